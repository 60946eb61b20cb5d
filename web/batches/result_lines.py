"""How results are written, for OpenAI's output and error files and for Anthropic's results.

What must always hold: a result is one line, also for clients that split at every line break of Unicode; its body is the
response's.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import orjson

from ..http.sse import on_one_line
from .batch_values import Api, Batch, LineResult, ResultKind, Status, Usage
from .store_database import OutputRow

_EXPIRED: Final = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
_CANCELLED: Final = ("batch_cancelled", "This request was not executed: the batch was cancelled.")


def result_of(
    batch: Batch,
    number: int,
    status: int,
    body: bytes,
    request_id: str | None,
    usage: Usage,
    *,
    has_record: bool,
) -> LineResult:
    """Return the result of a line that was served. `has_record`: it counts only if its usage record is written."""
    is_ok = status == HTTPStatus.OK
    one_line = body.replace(b"\n", b" ").replace(b"\r", b" ")  # in JSON these are only between its tokens
    if batch.api is Api.ANTHROPIC:
        head = b'{"type":"succeeded","message":' if is_ok else b'{"type":"errored","error":'
        payload = head + one_line + b"}"
    else:
        shown_id = orjson.dumps(request_id)
        payload = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, shown_id, one_line)
    kind = ResultKind.SUCCEEDED if is_ok else ResultKind.ERRORED
    return LineResult(batch.id, number, kind, payload, request_id if has_record else None, usage)


def kind_of_rest(batch: Batch) -> ResultKind:
    """Return how the lines of a batch end that were not run."""
    return ResultKind.CANCELED if batch.cancelling_at is not None else ResultKind.EXPIRED


def line_of(batch: Batch, row: OutputRow) -> tuple[bytes, bool]:
    """Return a line of the output, and whether it is for the file of errors."""
    line, is_error = _line_of(batch, row)
    return on_one_line(line), is_error


def _line_of(batch: Batch, row: OutputRow) -> tuple[bytes, bool]:
    custom_id = orjson.dumps(row.custom_id)
    kind = row.kind or kind_of_rest(batch)
    if batch.api is Api.ANTHROPIC:
        result = row.payload or orjson.dumps({"type": kind.value})
        return b'{"custom_id":%b,"result":%b}\n' % (custom_id, result), False
    line_id = b'"batch_req_%b_%d"' % (batch.id.removeprefix("batch_").encode(), row.number)
    if row.payload:
        line = b'{"id":%b,"custom_id":%b,"response":%b,"error":null}\n' % (line_id, custom_id, row.payload)
        return line, kind is not ResultKind.SUCCEEDED
    code, message = _CANCELLED if kind is ResultKind.CANCELED else _EXPIRED
    error = orjson.dumps({"code": code, "message": message})
    return b'{"id":%b,"custom_id":%b,"response":null,"error":%b}\n' % (line_id, custom_id, error), True


def end_of(batch: Batch) -> Status:
    """Return the state of a batch whose results are complete."""
    if batch.cancelling_at is not None:
        return Status.CANCELLED
    return Status.EXPIRED if batch.num_expired else Status.COMPLETED
