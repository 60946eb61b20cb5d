"""The routes of the pages: `/ui/` itself, its files, and who is looking.

    GET /ui                  redirects to /ui/
    GET /ui/                 the one page; what it shows is chosen after `#`
    GET /ui/static/{name}    scripts, styles, licences
    GET /ui/session          whose key this is, and what it may see
    GET /ui/key-names?id=…   the names of keys, of those that the asker may see
    GET /ui/usage            (`usage_table.py`)

What must always hold: the page and its files need no key and tell nothing; everything else is authenticated like the
API (`web/auth/auth.py`).
"""

from __future__ import annotations

from typing import Any

from quart import Response, request
from quart_trio import QuartTrio

import quipu

from ..api.admin.prices import PriceList
from ..api.admin.usage_source import UsageSource
from ..api.query import Parameters
from ..auth.keys import KeyStore
from ..auth.local_clients import is_from_this_machine
from ..request.errors import not_found
from ..request.request_context import current_request_context
from .static_files import PAGE, read_files, send
from .usage_table import install_usage_table


def install_ui(
    app: QuartTrio, keys: KeyStore, usage: UsageSource | None, prices: PriceList | None, *, open_admin: bool
) -> None:
    """Register the routes. Without a `usage` source the pages show no usage."""
    files = read_files()

    @app.get("/ui")
    async def redirect_to_page() -> Response:
        # relative, so that a proxy may serve this server below a path of its own
        return Response(b"", status=308, headers={"Location": "ui/"})

    @app.get("/ui/")
    async def show_page() -> Response:
        return send(files[PAGE])

    @app.get("/ui/static/<path:name>")
    async def send_file(name: str) -> Response:
        file = files.get(name)
        if file is None:
            raise not_found("Unknown URL: no page has such a file.", code="unknown_url")
        return send(file)

    @app.get("/ui/session")
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

    @app.get("/ui/key-names")
    async def name_keys() -> dict[str, Any]:
        asked = Parameters(request.args).texts("id") or ()
        return {"names": keys.ring.names(asked, current_request_context().principal)}

    if usage is not None:
        install_usage_table(app, usage, prices)
