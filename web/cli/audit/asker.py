"""Sends the requests of an audit: within its budget, never more at once than allowed, each with a deadline.

No request raises. One that cannot be sent any more, because the budget is spent, the time is over or the server has
stopped answering, ends as an exchange with the failure `budget`, `late` or `gone`. Redirects are not followed, and
nothing is sent twice but what was refused with 429 or 503.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import attrs
import httpx2
import orjson

from ..bench.answer import message_of
from ..command_output import printable
from .answer_reader import AnswerReader
from .bounded_body import read_at_most, read_pieces
from .exchange import PATHS, Ask, Exchange, Failure
from .request_body import Target, body_of, headers_of

DRAIN_S = 1.0
"""How long the end of a stream may take after its last event."""
MAX_FAILURES = 3
"""So many requests in a row without an answer, and nothing more is sent."""
MAX_ERROR_BYTES = 64 << 10
NUM_RETRIES = 3
MAX_PAUSE_S = 10.0
_OK = 200
_BUSY = (429, 503)
_IGNORED = "x-quipu-ignored-fields"
_GONE = {"connect", "timeout"}


@attrs.define(eq=False)
class Asker:
    target: Target
    _http: httpx2.AsyncClient
    budget: int
    timeout_s: float
    concurrency: int
    max_time_s: float
    estimate: Callable[[Ask], int]
    """How many tokens a request will take, at most."""
    spent: int = 0
    num_requests: int = 0
    most_open: int = 0
    stopped: Failure | None = None
    """Why nothing more is sent."""
    _began_s: float = attrs.field(factory=anyio.current_time)
    _reserved: int = 0
    _num_open: int = 0
    _num_failures: int = 0
    _places: anyio.Semaphore = attrs.field()

    @_places.default
    def _make_places(self) -> anyio.Semaphore:
        return anyio.Semaphore(self.concurrency)

    async def ask(self, ask: Ask) -> Exchange:
        """Send one request, and return how it ended."""
        async with self._places:
            for retry in range(NUM_RETRIES + 1):
                if (stopped := self._why_not(self.estimate(ask))) is not None:
                    return Exchange(ask, stopped)
                exchange, pause_s = await self._ask_once(ask)
                if pause_s is None or retry == NUM_RETRIES:
                    break
                await anyio.sleep(pause_s)
        self._note(exchange)
        return exchange

    async def ask_together(self, asks: Sequence[Ask]) -> list[Exchange]:
        """Send several requests at once, and return how each ended."""
        ended: dict[int, Exchange] = {}

        async def one(place: int, ask: Ask) -> None:
            ended[place] = await self.ask(ask)

        async with anyio.create_task_group() as tasks:
            for place, ask in enumerate(asks):
                tasks.start_soon(one, place, ask)
        return [ended[place] for place in range(len(asks))]

    def _why_not(self, tokens: int) -> Failure | None:
        if self.stopped is None and self.spent + self._reserved + tokens > self.budget:
            self.stopped = Failure("budget", f"the budget of {self.budget} tokens is spent")
        if self.stopped is None and anyio.current_time() > self._began_s + self.max_time_s:
            self.stopped = Failure("late", f"{self.max_time_s:g} s are over")
        return self.stopped

    async def _ask_once(self, ask: Ask) -> tuple[Exchange, float | None]:
        """Send one request; return how it ended, and after how long to send it again, if at all."""
        reserved = self.estimate(ask)
        self._reserved += reserved
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        self.num_requests += 1
        cost = reserved  # of a request that is cancelled
        try:
            exchange, pause_s = await self._send(ask)
            cost = self._cost(exchange, reserved)
        finally:
            self._num_open -= 1
            self._reserved -= reserved
            self.spent += cost
        return exchange, pause_s

    async def _send(self, ask: Ask) -> tuple[Exchange, float | None]:
        reader = AnswerReader(ask, anyio.current_time())
        failure: Failure | None = None
        ignored, pause_s = "", None
        with anyio.move_on_after(self.timeout_s) as scope:
            try:
                url = self.target.url + PATHS[ask.api]
                headers = headers_of(ask, self.target)
                async with self._http.stream("POST", url, content=body_of(ask, self.target), headers=headers) as answer:
                    ignored = answer.headers.get(_IGNORED, "")
                    if (failure := await _refusal(answer)) is None:
                        await self._read(answer, reader, scope)
                    elif answer.status_code in _BUSY:
                        pause_s = _pause_s(answer.headers.get("retry-after"))
            except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
                kind = "connect" if isinstance(error, httpx2.ConnectError) else "network"
                failure = Failure(kind, printable(str(error) or repr(error))[:200])
        if scope.cancelled_caught and not reader.is_done:
            failure = Failure("timeout", f"no end within {self.timeout_s:g} s")
        return reader.end(anyio.current_time(), failure, ignored), pause_s

    async def _read(self, answer: httpx2.Response, reader: AnswerReader, scope: anyio.CancelScope) -> None:
        def take(received: bytes) -> bool:
            wants_more = reader.feed(received, anyio.current_time())
            if reader.is_done:
                scope.deadline = min(scope.deadline, anyio.current_time() + DRAIN_S)
            return wants_more

        await read_pieces(answer, take)

    def _cost(self, exchange: Exchange, reserved: int) -> int:
        """Return the tokens to book: what the server counted, unless it counted nothing or absurdly much."""
        said = exchange.said
        if said.prompt is None:
            return 0 if exchange.is_refused else reserved
        counted = said.prompt + (said.completion or 0)
        return counted if counted <= 4 * reserved else reserved

    def _note(self, exchange: Exchange) -> None:
        if exchange.failure is None or exchange.failure.kind not in _GONE:
            self._num_failures = 0
            return
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            last = f"{exchange.failure.kind}: {exchange.failure.message}"
            self.stopped = Failure("gone", f"the server no longer answers: {last}")


async def _refusal(answer: httpx2.Response) -> Failure | None:
    """Return why a response cannot be read, None if it can."""
    if answer.headers.get("content-encoding", "identity") != "identity":
        return Failure("compressed", "the response is compressed, although that was not asked for")
    if answer.status_code == _OK:
        return None
    if answer.is_redirect:
        return Failure(f"http_{answer.status_code}", f"to {printable(answer.headers.get('location', ''))[:100]}")
    content = await read_at_most(answer, MAX_ERROR_BYTES)
    text = "an error that is too long" if content is None else _error_text(content)
    return Failure(f"http_{answer.status_code}", printable(text)[:200])


def _error_text(content: bytes) -> str:
    try:
        return message_of(orjson.loads(content))
    except (orjson.JSONDecodeError, RecursionError):  # it may be nested a thousand times
        return content[:200].decode("utf-8", "replace")


def _pause_s(retry_after: str | None) -> float:
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6:
        return min(float(retry_after), MAX_PAUSE_S)
    return 1.0
