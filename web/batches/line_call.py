"""Sends one line to the application of this process, as an HTTP server would: by ASGI, without a socket.

So a line is read, checked, limited and served by the same code as any request. What must always hold: whatever the
application does, the call ends when its request has ended; nothing of the answer is kept beyond `MAX_ERROR_BYTES`
where the handler keeps it itself.
"""

from __future__ import annotations

from typing import Any, Final, cast

import attrs
import trio
from hypercorn.typing import ASGIFramework

from ..request.batch_line import STATE_KEY, LineRequest

MAX_ERROR_BYTES: Final = 1 << 20
"""Of the body of a response that is needed here: an error from before the request was opened."""
_ANTHROPIC_VERSION: Final = b"2023-06-01"


@attrs.define
class LineResponse:
    status: int = 0
    """0: there was no response."""
    body: bytes = b""
    request_id: str = ""


async def call_line(app: ASGIFramework, path: str, body: bytes, line: LineRequest, name: str) -> LineResponse:
    """Serve a line. `name` is its id for logs and records."""
    response = LineResponse()
    pieces: list[bytes] = []
    is_sent = False

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            response.status = message["status"]
            headers = dict(message["headers"])
            response.request_id = headers.get(b"x-quipu-request-id", b"").decode("latin1")
        elif line.render is None and sum(map(len, pieces)) < MAX_ERROR_BYTES:
            pieces.append(bytes(message.get("body", b"")))

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", name.encode()),
            (b"anthropic-version", _ANTHROPIC_VERSION),
        ],
        "client": None,
        "server": None,
        "state": {STATE_KEY: line},
        "extensions": {},
    }
    await cast(Any, app)(scope, receive, send)
    response.body = b"".join(pieces)
    return response
