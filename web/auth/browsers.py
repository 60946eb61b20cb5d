"""Protection from requests that web pages make a browser send: checks of `Host` and `Origin`, and CORS.

Any page can make a browser send requests to a server on its machine's loopback address, and through a name that
resolves to 127.0.0.1 (DNS rebinding) read the responses too. An app without `BrowserRules` checks nothing.

What must always hold: a preflight, which carries no key, is granted to allowed origins and to no others.
"""

from __future__ import annotations

from http import HTTPStatus

from quart import Response, request
from quart_trio import QuartTrio

from ..request.errors import APIError, turn_away
from .browser_rules import BrowserRules, is_same_origin

EXPOSED_HEADERS = "X-Request-Id, X-Quipu-Request-Id, X-Quipu-Ignored-Fields, request-id, Retry-After"
"""Response headers that a page of an allowed origin may read, besides the safelisted ones."""
METHODS = "GET, POST, DELETE, OPTIONS"
PREFLIGHT_MAX_AGE_S = 600


def install_browser_rules(app: QuartTrio, rules: BrowserRules) -> None:
    """Check every request of `app`, before its key is checked."""

    @app.before_request
    async def check() -> Response | None:
        host, origins = request.headers.get("Host", ""), request.headers.getlist("Origin")
        # HTTP/1.0 does without, which probes of proxies use and no browser does; Quart then adds an empty one
        has_host = any(name == b"host" for name, _ in request.scope["headers"])
        if has_host and not rules.allows_host(host):
            return turn_away(_wrong_host())
        if origins and all(map(rules.allows_origin, origins)):
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            return _preflight() if is_preflight else None
        if rules.refuses_others and _is_cross_site(host, origins):
            return turn_away(_cross_site())
        return None

    @app.after_request
    async def add_cors_headers(response: Response) -> Response:
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
    if asked is not None:  # API clients send many headers of their own, and `*` does not cover `Authorization`
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
