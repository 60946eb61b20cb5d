"""What web pages may make a browser ask: requests are checked by their `Host` and their origin, and CORS is answered.

A server on loopback is out of reach for strangers, but not for the browser of somebody who works on that machine: any
page can have it send requests there, and by a name of its own that resolves to 127.0.0.1 (DNS rebinding) read the
answers, too. `quipu serve` makes the `BrowserRules`; an app that is made without them checks nothing.

What must always hold: a preflight, which brings no key, is answered for origins that were named and for no others.
"""

from __future__ import annotations

from http import HTTPStatus

from quart import Response, request
from quart_trio import QuartTrio

from ..request.errors import APIError, turn_away
from .browser_rules import BrowserRules, is_same_origin

EXPOSED_HEADERS = "X-Request-Id, X-Quipu-Request-Id, X-Quipu-Ignored-Fields, request-id, Retry-After"
"""What a page may read of an answer, beside what every page may."""
METHODS = "GET, POST, DELETE, OPTIONS"
PREFLIGHT_MAX_AGE_S = 600


def install_browser_rules(app: QuartTrio, rules: BrowserRules) -> None:
    """Have every request of `app` checked before anybody asks for its key."""

    @app.before_request
    async def check() -> Response | None:
        host, origins = request.headers.get("Host", ""), request.headers.getlist("Origin")
        if not rules.allows_host(host):
            return turn_away(_wrong_host())
        if origins and all(map(rules.allows_origin, origins)):
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            return _preflight() if is_preflight else None
        if rules.refuses_others and _is_cross_site(host, origins):
            return turn_away(_cross_site())
        return None

    @app.after_request
    async def let_pages_read(response: Response) -> Response:
        if rules.allowed_origins:
            response.headers.add("Vary", "Origin")
            origin = request.headers.get("Origin")
            if origin is not None and rules.allows_origin(origin):
                response.headers["Access-Control-Allow-Origin"] = origin
                response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
        return response


def _preflight() -> Response:
    response = Response(b"", status=HTTPStatus.NO_CONTENT)
    response.headers["Access-Control-Allow-Methods"] = METHODS
    response.headers["Access-Control-Max-Age"] = str(PREFLIGHT_MAX_AGE_S)
    asked = request.headers.get("Access-Control-Request-Headers")
    if asked is not None:  # clients of the APIs send many of their own, which `*` would not cover where there are keys
        response.headers["Access-Control-Allow-Headers"] = asked
    return response


def _is_cross_site(host: str, origins: list[str]) -> bool:
    if request.headers.get("Sec-Fetch-Site", "").strip().lower() == "cross-site":
        return True
    return not all(is_same_origin(origin, host) for origin in origins)


def _wrong_host() -> APIError:
    message = (
        "Invalid `Host` header: this server answers only to the names of localhost. To allow another name, start it "
        "with --allowed-hosts NAME."
    )
    return APIError(HTTPStatus.FORBIDDEN, message, "invalid_request_error", param="Host", code="host_not_allowed")


def _cross_site() -> APIError:
    message = (
        "Cross-site request refused: this server has no API keys, so pages of other sites may not use it. To allow a "
        """site, start the server with --allowed-origins '["https://site.example"]'."""
    )
    return APIError(HTTPStatus.FORBIDDEN, message, "invalid_request_error", param="Origin", code="origin_not_allowed")
