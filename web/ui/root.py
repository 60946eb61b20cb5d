"""`GET /`: where who only knows the server's address finds what is there.

A browser is sent to the pages, or told that there are none; any other client gets a few URLs as JSON. What must always
hold: the answer is the same for everybody, since it needs no key (`web/auth/auth.py`).
"""

from __future__ import annotations

from http import HTTPStatus

import orjson
from quart import Response, request
from quart_trio import QuartTrio

_URLS = {"models": "/v1/models", "chat": "/v1/chat/completions", "messages": "/v1/messages", "health": "/health"}
_NO_PAGES = (
    "This is quipu, an LLM inference server. It was started with --no-ui and has no pages.\n"
    "Its APIs are those of OpenAI (base URL: this address with /v1) and Anthropic (base URL: this address).\n"
)


def install_root(app: QuartTrio, *, serves_ui: bool) -> None:
    """Register the route."""

    @app.get("/")
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
