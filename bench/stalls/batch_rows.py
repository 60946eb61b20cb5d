"""Rows that upload files and create batches: large files, many lines, the largest bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.http_load import request_of
from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import MEBIBYTE, Row, got, made, one, posted

FILES, BATCHES, MESSAGE_BATCHES = "/v1/files", "/v1/batches", "/v1/messages/batches"
_BOUNDARY = b"knots"
_FORM_TYPE = "multipart/form-data; boundary=knots"


def _form(data: bytes) -> bytes:
    part = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    form = part % (_BOUNDARY, b"purpose", b"", b"batch")
    return form + part % (_BOUNDARY, b"file", b'; filename="in.jsonl"', data) + b"--%b--\r\n" % _BOUNDARY


def _upload(data: Callable[[], bytes], times: int) -> Callable[[int], Sequence[RawRequest]]:
    """Upload a file with these contents."""

    def make(port: int) -> Sequence[RawRequest]:
        form = _form(data())
        head = (
            f"POST {FILES} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"Content-Type: {_FORM_TYPE}\r\nContent-Length: {len(form)}\r\n\r\n"
        )
        return [RawRequest(head.encode() + form)] * times

    return make


def _downloaded(port: int) -> Sequence[RawRequest]:
    file_id = made(port, FILES, _form(b"x" * (8 * MEBIBYTE)), _FORM_TYPE)
    return [got(f"{FILES}/{file_id}/content")] * 32


def _listed(port: int) -> Sequence[RawRequest]:
    return [*_upload(lambda: b"x", 200)(port), *[got(f"{FILES}?limit=10000")] * 50]


def _checked(port: int) -> Sequence[RawRequest]:
    """Make batches of a file with as many lines as it may have, of which the last one is refused."""
    line = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n'
    data = b"".join(line % number for number in [*range(49_999), 0])
    file_id = made(port, FILES, _form(data), _FORM_TYPE)
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return [RawRequest(request_of(port, body, BATCHES))] * 8


def _requests(num_bytes: int) -> dict[str, Any]:
    """Return a body with as many requests as fit, which each fail, since they have no messages."""
    return {"requests": [{"custom_id": f"{n}", "params": {}} for n in range(num_bytes // 40)]}


def _large_requests(custom_ids: Sequence[str]) -> dict[str, Any]:
    params = {"x": "y" * (7 * MEBIBYTE)}
    return {"requests": [{"custom_id": custom_id, "params": params} for custom_id in custom_ids]}


def _brackets(port: int) -> Sequence[RawRequest]:
    data = b'{"requests":[{"params":' + b"[]," * (20 * MEBIBYTE)
    return [RawRequest(posted(port, MESSAGE_BATCHES, data))] * 2


BATCH_ROWS = [
    Row("file of 32 MB, 8 times", _upload(lambda: b"x" * (32 * MEBIBYTE), 8), concurrency=8),
    Row("file of line ends, 32 MB, 4 times", _upload(lambda: b"\r\n" * (16 * MEBIBYTE), 4), concurrency=4),
    Row("file of boundaries, 8 MB, 4 times", _upload(lambda: b"\r\n--knot" * MEBIBYTE, 4), concurrency=4),
    Row("batch of messages, 40,000 requests", one(MESSAGE_BATCHES, lambda: _requests(40 * 40_000))),
    Row(
        "batch of messages, one of 7 MB, 4 times",
        one(MESSAGE_BATCHES, lambda: _large_requests("a"), 4),
        concurrency=4,
    ),
    Row("batch of messages, 63 MB", one(MESSAGE_BATCHES, lambda: _large_requests("abcdefgha"), 2), concurrency=2),
    Row("batch of messages, 60 MB of brackets", _brackets, concurrency=2),
    Row("batches of 50,000 lines, 8 times", _checked, concurrency=8),
    Row("file of 8 MB, downloaded 32 times", _downloaded, concurrency=8),
    Row("200 files, listed 50 times", _listed, concurrency=16),
]
