"""The routes of the pages, and `/`.

    GET /                    sends a browser to the pages, or says that there are none; others get a few URLs as JSON
    GET /ui                  redirects to /ui/
    GET /ui/                 the one page; what it shows is chosen after `#`
    GET /docs                the page that shows /openapi.json
    GET /ui/static/{name}    scripts, styles, licences
    GET /ui/session          whose key this is, and what it may see
    GET /ui/key-names?id=…   the names of keys, of those that the asker may see
    GET /ui/usage            (`usage_table.py`)

What must always hold: `/`, the page and its files need no key and tell everybody the same; everything else is
authenticated like the API (`web/auth/auth.py`).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from quart import Response, request
from quart_trio import QuartTrio

import quipu

from ..api.admin.prices import PriceList
from ..api.admin.usage_source import UsageSource
from ..api.operation import route
from ..api.query import Parameters
from ..auth.auth import is_from_this_machine
from ..auth.keys import KeyStore
from ..request.errors import not_found
from ..request.request_context import current_request_context
from .page_schemas import FILE, KEY_NAMES, REDIRECT, ROOT, SESSION, SHOW_DOCS, SHOW_PAGE
from .static_files import DOCS_PAGE, PAGE, read_files, send
from .usage_table import install_usage_table


def install_ui(
    app: QuartTrio, keys: KeyStore, usage: UsageSource | None, prices: PriceList | None, *, open_admin: bool
) -> None:
    """Register the routes. Without a `usage` source the pages show no usage."""
    files = read_files()

    @route(app, "GET /ui", REDIRECT)
    async def redirect_to_page() -> Response:
        # relative, so that a proxy may serve this server below a path of its own
        return Response(b"", status=308, headers={"Location": "ui/"})

    @route(app, "GET /ui/", SHOW_PAGE)
    async def show_page() -> Response:
        return send(files[PAGE])

    @route(app, "GET /docs", SHOW_DOCS)
    async def show_docs() -> Response:
        return send(files[DOCS_PAGE])

    @route(app, "GET /ui/static/<path:name>", FILE)
    async def send_file(name: str) -> Response:
        file = files.get(name)
        if file is None:
            raise not_found("Unknown URL: no page has such a file.", code="unknown_url")
        return send(file)

    @route(app, "GET /ui/session", SESSION)
    async def show_session() -> dict[str, Any]:
        principal = current_request_context().principal
        sees_accounts = not keys.is_open or open_admin or is_from_this_machine()
        return {
            "version": quipu.__version__,
            "needs_key": not keys.is_open,
            "tenant": principal.tenant,
            "key_id": principal.key_id,
            "key_name": principal.key_name,
            "is_admin": principal.is_admin,
            "shows_live": principal.is_admin,
            "shows_cache": sees_accounts,
            "shows_usage": usage is not None and sees_accounts,
            "has_prices": prices is not None,
        }

    @route(app, "GET /ui/key-names", KEY_NAMES)
    async def name_keys() -> dict[str, Any]:
        asked = Parameters(request.args).texts("id") or ()
        return {"names": keys.ring.names(asked, current_request_context().principal)}

    if usage is not None:
        install_usage_table(app, usage, prices)


_URLS = {"models": "/v1/models", "chat": "/v1/chat/completions", "messages": "/v1/messages", "health": "/health"}
_NO_PAGES = (
    "This is quipu, an LLM inference server. It was started with --no-ui and has no pages.\n"
    "Its APIs are those of OpenAI (base URL: this address with /v1) and Anthropic (base URL: this address).\n"
)


def install_root(app: QuartTrio, *, serves_ui: bool) -> None:
    @route(app, "GET /", ROOT)
    async def show_way() -> Response:
        if not _is_browser():
            urls = _URLS | ({"ui": "/ui"} if serves_ui else {})
            response = Response(orjson.dumps({"server": "quipu", "urls": urls}), content_type="application/json")
        elif serves_ui:
            # relative, so that a proxy may serve this server below a path of its own
            response = Response(b"", status=HTTPStatus.TEMPORARY_REDIRECT, headers={"Location": "ui/"})
        else:
            response = Response(_NO_PAGES, content_type="text/plain; charset=utf-8")
        response.headers["Vary"] = "Accept"
        return response


def _is_browser() -> bool:
    return any(kind.lower() == "text/html" and quality > 0 for kind, quality in request.accept_mimetypes)
