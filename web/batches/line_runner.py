"""One line of a batch, from its place in the input file to its result.

    read ─▶ served by the application (`line_call.py`) ─▶ its account ends ─▶ result stored ─▶ record written ─▶ done

The result is stored before the usage record is written, and counts once the record is there: after a crash in between,
neither counts, and the line is run again. An attempt that this server has failed (an engine died, no room) is repeated;
its record says so, and it is not billed.

What must always hold: a line is billed for the attempt whose answer is its result, and for no other; a line that cannot
be served now waits and blocks no other batch's; whatever an attempt raises fails that attempt alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum, auto
from http import HTTPStatus
from typing import Final

import attrs
import structlog
import trio
from hypercorn.typing import ASGIFramework

from quipu.actors.messages.handler import Closed
from quipu.actors.messages.outcomes import ErrorKind, Outcome

from ..http.turns import turn
from ..request.batch_line import LineRequest
from ..request.errors import APIError, internal
from ..telemetry.logs import frames_of
from .batch_values import Api, Batch, Line, LineResult, Usage
from .line_call import LineResponse, call_line
from .line_check import BadLine
from .result_lines import result_of

MAX_ATTEMPTS: Final = 3
"""Of a line whose attempts this server fails for another reason than a lack of room."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0
_LATER: Final = frozenset({HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS, 529})

log = structlog.get_logger("quipu.batches")

KeepResult = Callable[[LineResult, Callable[[], object]], object]
"""Stores a result, then calls the function."""


@attrs.define(eq=False)
class LineRun:
    """One attempt to run a line."""

    batch: Batch
    line: Line
    nursery: trio.Nursery
    keep_result: KeepResult
    ended: trio.Event = attrs.field(factory=trio.Event)
    """Set when its request has ended, if one was opened."""
    response: LineResponse = attrs.field(factory=LineResponse)
    is_kept: bool = False
    is_given_up: bool = False
    """The server stops: a result is no longer stored, and the record of its request is left to the next start."""
    was_refused_room: bool = False

    def on_end(self, request: LineRequest, closed: Closed, write: Callable[[], object]) -> None:
        """Keep the answer of a request that has ended, unless the line is to be run again. (`KeepAnswer`)"""
        if not is_result(closed):
            self.was_refused_room = closed.error is not None and closed.error.kind is ErrorKind.OVERLOADED
            write()
            self.ended.set()
        elif not self.is_given_up:
            self.nursery.start_soon(self._keep, request, closed, write)

    async def _keep(self, request: LineRequest, closed: Closed, write: Callable[[], object]) -> None:
        try:
            result = self._result(closed, *await render(request, closed, self.batch.api))
        except Exception as error:
            log.error(
                "batch.answer_crashed",
                request_id=closed.record.request_id,
                error_type=type(error).__name__,
                frames=frames_of(error),
            )
            crashed = internal()
            body = error_body(crashed, self.batch.api, closed.record.request_id)
            result = self._result(closed, crashed.status, body)

        def on_stored() -> None:
            self.is_kept = True
            write()
            self.ended.set()

        self.keep_result(result, on_stored)

    def _result(self, closed: Closed, status: int, body: bytes) -> LineResult:
        record = closed.record
        usage = Usage(
            input_tokens=record.prompt_tokens or 0,
            cached_tokens=record.cached_tokens or 0,
            output_tokens=record.completion_tokens,
            reasoning_tokens=record.reasoning_tokens,
        )
        has_record = record.admitted_at is not None
        return result_of(self.batch, self.line.number, status, body, record.request_id, usage, has_record=has_record)


def is_result(closed: Closed) -> bool:
    """Return whether a request's end is its line's result; otherwise the line is run again."""
    record, error = closed.record, closed.error
    if record.fault is not None or record.outcome is Outcome.CANCELLED:
        return False
    return error is None or error.kind is not ErrorKind.OVERLOADED or record.admitted_at is not None


async def render(request: LineRequest, closed: Closed, api: Api) -> tuple[int, bytes]:
    """Return status and body of the answer to a request that has ended."""
    assert request.render is not None
    try:
        answer = request.render(closed)
        parts: list[bytes] = []
        for piece in answer.pieces:
            parts.append(piece)
            async with turn():
                pass
        return answer.status, b"".join(parts)
    except APIError as error:
        return error.status, error_body(error, api, closed.record.request_id)


def error_body(error: APIError, api: Api, request_id: str | None) -> bytes:
    return error.anthropic_body(request_id) if api is Api.ANTHROPIC else error.body()


class Attempt(Enum):
    """What became of an attempt to run a line."""

    KEPT = auto()
    """The line has its result."""
    WAITS = auto()
    """There was no room for it."""
    FAILED = auto()


async def run_line(
    app: ASGIFramework,
    batch: Batch,
    line: Line,
    read: Callable[[Line], Awaitable[bytes]],
    keep_result: KeepResult,
    is_wanted: Callable[[], bool],
) -> bool:
    """Run a line until it has a result, which is stored. Return False if it is no longer wanted before.

    `read` returns its body, or raises BadLine.
    """
    pause_s, num_failed = FIRST_PAUSE_S, 0
    async with trio.open_nursery() as nursery:
        while is_wanted():
            run = LineRun(batch, line, nursery, keep_result)
            attempt = await _attempt(app, run, read)
            if attempt is Attempt.KEPT:
                return True
            num_failed += attempt is Attempt.FAILED
            if num_failed >= MAX_ATTEMPTS:
                message = "The server failed this request repeatedly."
                await _keep_failure(batch, line, message, run.response.request_id, keep_result)
                return True
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
    return False


async def _attempt(app: ASGIFramework, run: LineRun, read: Callable[[Line], Awaitable[bytes]]) -> Attempt:
    batch, line = run.batch, run.line
    request = LineRequest(batch.id, batch.tenant, batch.key_id, run.on_end)
    try:
        try:
            body = await read(line)
            run.response = await call_line(app, batch.endpoint, body, request, f"{batch.id}#{line.number}")
        except BadLine:
            log.error("batch.line_lost", batch_id=batch.id, line=line.number, help="its file has changed")
            await _keep_failure(batch, line, "This line cannot be read any more.", None, run.keep_result)
            return Attempt.KEPT
        except Exception as error:  # a bug or a lack of memory fails this attempt, not the server
            log.error(
                "batch.line_crashed",
                batch_id=batch.id,
                line=line.number,
                error_type=type(error).__name__,
                frames=frames_of(error),
            )
        if request.render is not None:
            await run.ended.wait()
    except BaseException:
        run.is_given_up = True
        raise
    if request.render is not None:
        if run.is_kept:
            return Attempt.KEPT
        return Attempt.WAITS if run.was_refused_room else Attempt.FAILED
    response = run.response
    if response.status in _LATER:
        return Attempt.WAITS
    if HTTPStatus.BAD_REQUEST <= response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        await _keep_refusal(batch, line, response, run.keep_result)
        return Attempt.KEPT
    return Attempt.FAILED


async def _keep_failure(batch: Batch, line: Line, message: str, request_id: str | None, keep: KeepResult) -> None:
    """Keep an error of this server as a line's answer."""
    error = internal(message)
    failed = LineResponse(error.status, error_body(error, batch.api, None), request_id or "")
    await _keep_refusal(batch, line, failed, keep)


async def _keep_refusal(batch: Batch, line: Line, response: LineResponse, keep_result: KeepResult) -> None:
    """Keep the answer to a line for which no tokens were computed that count."""
    stored = trio.Event()
    result = result_of(
        batch, line.number, response.status, response.body, response.request_id or None, Usage(), has_record=False
    )
    keep_result(result, stored.set)
    await stored.wait()
