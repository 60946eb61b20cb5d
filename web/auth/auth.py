"""Authentication of every route but `OPEN_ROUTES`, before anything is read or opened.

The key comes from `Authorization: Bearer` or `x-api-key`; handlers read its owner from `context.principal`.

What must always hold: a route that is not listed here needs a key, and so does a path that does not exist, so that a
stranger cannot tell them apart.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, cast

import attrs
from quart import Response, request
from quart_trio import QuartTrio

from ..request.errors import APIError, turn_away
from ..request.principal import Principal
from ..request.request_context import RequestContext, current_request_context
from .browser_rules import is_loopback
from .keys import KeyStore, runtime_principal

PAGE_ROUTES = frozenset({"/docs", "/ui", "/ui/", "/ui/static/<path:name>"})
"""The page of `web/ui/` and its files, which asks for a key, and for data with that key."""
OPEN_ROUTES = frozenset({"/", "/health", "/ready", "/openapi.json"}) | PAGE_ROUTES
"""Routes for probes, which have no key, for what a browser loads before it has one, and for the description of the API,
which is the same on every server of a version."""
ADMIN_ROUTES = frozenset(
    {
        "/metrics",
        "/server_info",
        "/get_server_info",
        "/load",
        "/slots",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""Routes that show or change what all tenants share."""
ADMIN_TREES = ("/v1/admin", "/v1/organization", "/v1/organizations")
"""Prefixes of routes that need an admin key as well."""

RECORD_ROUTES = frozenset(
    {
        "/v1/usage/<request_id>",
        "/v1/usage/<request_id>/receipt",
        "/v1/cache/explain/<request_id>",
        "/v1/cache/stats",
        "/v1/cache/tree",
        "/ui/usage",
    }
)
"""Routes that show each tenant its own records and numbers."""
SHOWN_ROUTES = frozenset({"/metrics", "/server_info", "/get_server_info", "/load", "/slots"})
"""Routes that change nothing and reveal no request: without keys everybody may read them."""


def needs_admin(route: str) -> bool:
    """Return whether an admin key is needed. `route` is a rule of the URL map, or the path if no rule matches."""
    return route in ADMIN_ROUTES or any(route == tree or route.startswith(f"{tree}/") for tree in ADMIN_TREES)


def is_local(route: str) -> bool:
    """Return whether a server without keys serves `route` only to its own machine."""
    return (needs_admin(route) and route not in SHOWN_ROUTES) or route in RECORD_ROUTES


def install_auth(app: QuartTrio, keys: KeyStore, tenant: str, *, open_admin: bool) -> None:
    """Require authentication for all routes. Without keys everybody is `tenant`, with `open_admin` an admin."""
    everybody = runtime_principal(tenant)

    @app.before_request
    async def authenticate() -> Response | None:
        context = current_request_context()
        rule = request.url_rule
        route = request.path if rule is None else rule.rule
        if context.line is not None:
            return _admit_line(context, keys, everybody)
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
                message = "This endpoint requires an admin API key."
                raise APIError(HTTPStatus.FORBIDDEN, message, "invalid_request_error", code="admin_key_required")
        except APIError as error:
            response = turn_away(error)
            if error.status == HTTPStatus.UNAUTHORIZED:
                response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return None


def _admit_line(context: RequestContext, keys: KeyStore, everybody: Principal) -> Response | None:
    """Let a line of a batch act for the key that created the batch, as long as that key exists."""
    assert context.line is not None
    tenant, key_id = context.line.tenant, context.line.key_id
    found = everybody if keys.is_open and tenant == everybody.tenant else keys.ring.holder(key_id, tenant)
    if found is None:
        return turn_away(unauthorized("The API key that created this batch is no longer valid."))
    context.principal = attrs.evolve(found, key_id=key_id)
    context.log = context.log.bind(tenant=tenant, key_id=key_id, batch_id=context.line.batch_id)
    return None


def is_from_this_machine() -> bool:
    """Return whether the current request was sent from this machine and not forwarded by a proxy."""
    client = cast(dict[str, Any], request.scope).get("client")
    if client is None or not is_loopback(client[0]):
        return False
    names = [name.lower() for name, _ in request.headers]
    return "forwarded" not in names and not any(name.startswith("x-forwarded-") for name in names)


def unauthorized(message: str) -> APIError:
    return APIError(HTTPStatus.UNAUTHORIZED, message, "invalid_request_error", code="invalid_api_key")


def not_from_here() -> APIError:
    message = (
        "This server has no API keys, so it serves this endpoint only to requests from its own machine that no proxy "
        "has forwarded. Start it with an admin key, or with --open-admin to serve everybody."
    )
    return APIError(HTTPStatus.FORBIDDEN, message, "invalid_request_error", code="local_only")


def _presented_key() -> str:
    """Return the one key that the request carries. Raises APIError."""
    presented = {value.strip() for value in request.headers.getlist("x-api-key")}
    for value in request.headers.getlist("Authorization"):
        scheme, _, key = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            presented.add(key.strip())
    presented.discard("")
    if not presented:
        raise unauthorized("No API key provided. Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.")
    if len(presented) > 1:
        # There is no telling which of them a proxy in front has checked.
        raise unauthorized("Different API keys provided. Send only one.")
    return presented.pop()
