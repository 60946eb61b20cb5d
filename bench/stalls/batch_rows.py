"""Rows that upload files and create batches: large files, many lines, the largest bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import MEBIBYTE, Row, one

FILES, MESSAGE_BATCHES = "/v1/files", "/v1/messages/batches"
_BOUNDARY = b"knots"


def _upload(data: Callable[[], bytes], times: int) -> Callable[[int], Sequence[RawRequest]]:
    """Upload a file with these contents."""

    def make(port: int) -> Sequence[RawRequest]:
        part = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        form = part % (_BOUNDARY, b"purpose", b"", b"batch")
        form += part % (_BOUNDARY, b"file", b'; filename="in.jsonl"', data()) + b"--%b--\r\n" % _BOUNDARY
        head = (
            f"POST {FILES} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"Content-Type: multipart/form-data; boundary=knots\r\nContent-Length: {len(form)}\r\n\r\n"
        )
        return [RawRequest(head.encode() + form)] * times

    return make


def _requests(num_bytes: int) -> dict[str, Any]:
    """Return a body with as many requests as fit, which each fail, since they have no messages."""
    return {"requests": [{"custom_id": f"{n}", "params": {}} for n in range(num_bytes // 40)]}


BATCH_ROWS = [
    Row("file of 32 MB, 8 times", _upload(lambda: b"x" * (32 * MEBIBYTE), 8), concurrency=8),
    Row("file of line ends, 32 MB, 4 times", _upload(lambda: b"\r\n" * (16 * MEBIBYTE), 4), concurrency=4),
    Row("file of boundaries, 8 MB, 4 times", _upload(lambda: b"\r\n--knot" * MEBIBYTE, 4), concurrency=4),
    Row("batch of messages, 40,000 requests", one(MESSAGE_BATCHES, lambda: _requests(40 * 40_000))),
    Row(
        "batch of messages, one of 7 MB, 4 times",
        one(MESSAGE_BATCHES, lambda: {"requests": [{"custom_id": "a", "params": {"x": "y" * (7 * MEBIBYTE)}}]}, 4),
        concurrency=4,
    ),
]
