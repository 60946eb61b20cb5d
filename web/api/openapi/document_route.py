"""`GET /openapi.json`: the OpenAPI document, made once.

It needs no key: it is the same on every server of a version, and tools that read it have none.
"""

from __future__ import annotations

import hashlib

import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.threads import run_in_thread

from ..operation import ANY_OBJECT, OPERATORS, Operation, route
from .document import make_document

DOCUMENT = Operation(
    summary="Describe the API as OpenAPI",
    tag=OPERATORS,
    answer={**ANY_OBJECT, "required": ["openapi", "info", "paths"]},
)


def install_document(app: QuartTrio) -> None:
    """Register the route, after all others."""
    made: list[bytes] = []
    making = trio.Lock()

    @route(app, "GET /openapi.json", DOCUMENT)
    async def show_document() -> Response:
        async with making:
            if not made:
                made.append(await run_in_thread(_make, app))
        etag = hashlib.sha256(made[0]).hexdigest()[:32]
        if request.if_none_match.contains_weak(etag):
            response = Response(b"", status=304)
        else:
            response = Response(made[0], content_type="application/json")
        response.set_etag(etag)
        response.headers["Cache-Control"] = "no-cache"
        return response


def _make(app: QuartTrio) -> bytes:
    return orjson.dumps(make_document(app))
