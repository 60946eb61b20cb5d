"""Every route is closed, save those in `OPEN_ROUTES`: who asks is settled before anything is read or opened.

A hook that runs right after the context was made, before a byte of the body is asked for. It takes the key from
`Authorization: Bearer` or `x-api-key`, and hangs its owner on the context; handlers read `context.principal`.

What must always hold: a route that is not listed here needs a key, and so does a path that does not exist: a stranger
does not learn which is which.
"""

from __future__ import annotations

from http import HTTPStatus

from quart import Response, request
from quart_trio import QuartTrio

from ..request.errors import APIError, turn_away
from ..request.request_context import current_request_context
from .keys import KeyStore, runtime_principal
from .local_clients import is_from_this_machine

OPEN_ROUTES = frozenset({"/health", "/ready"})
"""For probes, which have no key."""
ADMIN_ROUTES = frozenset({"/metrics", "/server_info", "/reset_prefix_cache"})
"""They show, or touch, what all tenants share."""
ADMIN_TREES = ("/v1/organization", "/v1/organizations")
"""Everything below them, likewise."""

RECORD_ROUTES = frozenset({"/v1/usage/<request_id>"})
"""Where there are keys each shows a tenant its own records."""
SHOWN_ROUTES = frozenset({"/metrics", "/server_info"})
"""They change nothing and tell of nobody's requests: without keys everybody may see them, Prometheus elsewhere too."""


def needs_admin(route: str) -> bool:
    """Whether an admin key is needed. A route is a rule of the URL map, or the path where no rule fits."""
    return route in ADMIN_ROUTES or any(route == tree or route.startswith(f"{tree}/") for tree in ADMIN_TREES)


def is_local(route: str) -> bool:
    """Whether a server without keys answers it to its own machine alone: it changes what all share, or tells of all."""
    return (needs_admin(route) and route not in SHOWN_ROUTES) or route in RECORD_ROUTES


def install_auth(app: QuartTrio, keys: KeyStore, tenant: str, *, open_admin: bool) -> None:
    """Close the routes of `app`, present and future; `tenant` is everybody's where there are no keys.

    `open_admin`: where there are no keys, admin routes are everybody's, too.
    """
    everybody = runtime_principal(tenant)

    @app.before_request
    async def authenticate() -> Response | None:
        context = current_request_context()
        rule = request.url_rule
        route = request.path if rule is None else rule.rule
        if keys.is_open:
            context.principal = everybody
            if is_local(route) and not open_admin and not is_from_this_machine():
                return turn_away(not_from_here())
            return None
        if rule is not None and rule.rule in OPEN_ROUTES:
            return None
        try:
            principal = keys.ring.find(_presented_key())
            if principal is None:
                raise unauthorized("Incorrect API key provided.")
            context.principal = principal
            context.log = context.log.bind(tenant=principal.tenant, key_id=principal.key_id)
            if needs_admin(route) and not principal.is_admin:
                raise forbidden()
        except APIError as error:
            response = turn_away(error)
            if error.status == HTTPStatus.UNAUTHORIZED:
                response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return None


def unauthorized(message: str) -> APIError:
    return APIError(HTTPStatus.UNAUTHORIZED, message, "invalid_request_error", code="invalid_api_key")


def forbidden() -> APIError:
    message = "This endpoint requires an admin API key."
    return APIError(HTTPStatus.FORBIDDEN, message, "invalid_request_error", code="admin_key_required")


def not_from_here() -> APIError:
    message = (
        "This server has no API keys, so it serves this endpoint only to requests from its own machine that no proxy "
        "has forwarded. Start it with an admin key, or with --open-admin to serve everybody."
    )
    return APIError(HTTPStatus.FORBIDDEN, message, "invalid_request_error", code="local_only")


def _presented_key() -> str:
    """The one key that the request brought. Raises APIError."""
    presented = {value.strip() for value in request.headers.getlist("x-api-key")}
    for value in request.headers.getlist("Authorization"):
        scheme, _, key = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            presented.add(key.strip())
    presented.discard("")
    if not presented:
        raise unauthorized("No API key provided. Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.")
    if len(presented) > 1:
        # Which of them a proxy in front has looked at cannot be told from here.
        raise unauthorized("Different API keys provided. Send only one.")
    return presented.pop()
