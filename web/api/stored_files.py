"""What the endpoints of files and batches of both APIs have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, BinaryIO, Final

import orjson
from quart import Response

from quipu.actors.threads import run_in_thread

from ..batches.batch_refusals import storage_failed
from ..batches.batch_service import BatchService
from ..batches.batch_values import StoredFile
from ..request.errors import not_found
from ..request.request_context import current_request_context

PIECE_BYTES: Final = 256 * 1024


def json_response(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), content_type="application/json")


async def content_of(service: BatchService, file: StoredFile, content_type: str) -> Response:
    """Return the response with a file's contents. Raises APIError."""
    try:
        opened = await run_in_thread(service.store.folder.open, file.id)
    except FileNotFoundError:
        raise not_found(f"No such File object: {file.id}", "id") from None
    except OSError as error:
        raise storage_failed(error) from None
    current_request_context().scope.on_close(opened.close)
    response = Response(_contents(opened), content_type=content_type)
    response.headers["Content-Length"] = str(file.num_bytes)
    response.timeout = None
    return response


async def _contents(opened: BinaryIO) -> AsyncGenerator[bytes, None]:
    while data := await run_in_thread(opened.read, PIECE_BYTES):
        yield data
