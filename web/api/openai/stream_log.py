"""The events of a background response, for clients that read them now, later, or again from where they were cut off.

The log is a stream's sink (`../stream.py`) that nobody has to read. Event N of the stream has the `sequence_number` N.
What is pushed slowly is made in slices by the task that runs `make`. Logprobs, which several events repeat, are not in
the log: the holes for them are filled in slices for each reader (`responses_logprobs.py`).

What must always hold: what is logged is bounded, for one response and for all together, by dropping the oldest events;
a reader is told of events that were dropped, and never skips one; no event overtakes another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Iterator

import trio
from quart import Response

from ...http.sse import CONTENT_TYPE, HEADERS, MAX_JOINED_BYTES, MAX_WRITE_BYTES, PING, json_for_line
from ...http.turns import take_slice, turn
from ...options import AppOptions
from .responses_logprobs import Fill

MAX_LOG_BYTES = 8 << 20
"""Of the events of one response."""
MAX_ALL_BYTES = 256 << 20
"""Of those of all responses that are being generated."""
EVENT_OVERHEAD_BYTES = 64
_END = b"\n\n"


class LogBudget:
    """The memory of all logs."""

    def __init__(self, max_bytes: int = MAX_ALL_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class EventLog:
    def __init__(self, budget: LogBudget, first: int = 0, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._begun: list[bytes] = []
        """The first parts of an event that has not ended."""
        self._num_begun_bytes = 0
        self._is_dropping = False
        """The event that has not ended is too long to be kept."""
        self._waiting: deque[bytes | Iterator[bytes]] = deque()
        """What is pushed slowly, and what was pushed after it."""
        self._num_bytes = 0
        self.first = first
        """Number of the first event that is kept."""
        self.fill: Fill | None = None
        """Fills the holes in events, if they have any."""
        self.finished = False
        self._num_held: int | None = None
        """Events that readers may see, while the others wait until they are stored."""
        self._more = trio.Event()

    @property
    def num_events(self) -> int:
        """Events that readers may see or could have seen."""
        return self.first + len(self._events) if self._num_held is None else self._num_held

    @property
    def is_over(self) -> bool:
        return self.finished and self._num_held is None and not self._waiting

    def push(self, data: bytes) -> None:
        if self.finished:
            return
        if self._waiting:
            self._waiting.append(data)
        else:
            self._add(data)

    def push_slowly(self, chunks: Iterator[bytes]) -> None:
        if not self.finished:
            self._waiting.append(chunks)
            self._wake()

    async def make(self) -> None:
        """Make what is pushed slowly. Runs until it is cancelled."""
        while True:
            while self._waiting:
                async with turn():
                    self._make_some()
            await self._more.wait()

    def _make_some(self) -> None:
        first = self._waiting[0]
        data = first if isinstance(first, bytes) else take_slice(first, MAX_WRITE_BYTES)
        if isinstance(first, bytes) or not data:
            self._waiting.popleft()
        self._add(data)

    async def wait_made(self) -> None:
        """Wait until nothing is left to be made."""
        while self._waiting:
            await self._more.wait()

    def _add(self, data: bytes) -> None:
        """Add parts of events, or whole ones."""
        *ended, begun = data.split(_END)
        for part in ended:
            self._begin(part)
            self._end_event()
        self._begin(begun)
        if self._num_bytes > self._max_bytes or self._budget.num_bytes > self._budget.max_bytes:
            self._drop_oldest()
        self._wake()

    def _begin(self, part: bytes) -> None:
        if not part or self._is_dropping:
            return
        self._begun.append(part)
        self._num_begun_bytes += len(part)
        self._count(len(part))
        if self._num_begun_bytes > self._max_bytes:
            self._drop_begun()

    def _end_event(self) -> None:
        if self._is_dropping:
            self._count(-self._num_bytes)
            self.first += len(self._events) + 1
            self._events.clear()
            self._is_dropping = False
            return
        self._events.append(b"".join((*self._begun, _END)))
        self._count(len(_END) + EVENT_OVERHEAD_BYTES)
        self._begun, self._num_begun_bytes = [], 0

    def _drop_begun(self) -> None:
        self._count(-self._num_begun_bytes)
        self._begun, self._num_begun_bytes = [], 0
        self._is_dropping = True

    def _drop_oldest(self) -> None:
        """Drop an eighth of what is kept: to shift the rest takes as long for one event as for many."""
        if self._begun and not self._events:
            self._drop_begun()
        least, num_dropped = self._num_bytes // 8, 0
        while num_dropped < len(self._events) and least > 0:
            num_bytes = len(self._events[num_dropped]) + EVENT_OVERHEAD_BYTES
            self._count(-num_bytes)
            least -= num_bytes
            num_dropped += 1
        del self._events[:num_dropped]
        self.first += num_dropped

    def finish(self) -> None:
        self.finished = True
        self._wake()

    def hold(self) -> None:
        """Show readers nothing more until `release_held`."""
        self._num_held = self.num_events

    def release_held(self) -> None:
        self._num_held = None
        self._wake()

    def forget(self) -> None:
        """Give the memory back, whoever still reads: it is stored, or nobody may read it any more."""
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0
        self._waiting.clear()
        self._wake()

    def joined(self) -> bytes:
        return b"".join(self._events)

    async def read(self, at: int, heartbeat_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `at` on, as they come, and a heartbeat after each such time of silence."""
        while True:
            if at < self.first:
                yield _dropped(at)
                return
            if at < self.num_events:
                data, at = self._take(at)
                if self.fill is None:
                    yield data
                    continue
                pieces = self.fill((data,))
                while data := await _next_slice(pieces):
                    yield data
                continue
            if self.is_over:
                return
            has_more = False
            with trio.move_on_after(heartbeat_s):
                await self._more.wait()
                has_more = True
            if not has_more:
                yield PING

    def _take(self, at: int) -> tuple[bytes, int]:
        """Return the next events for one write, and the number of the one after them."""
        taken: list[bytes] = []
        num_bytes = 0
        while at < self.num_events and num_bytes < MAX_JOINED_BYTES:
            taken.append(self._events[at - self.first])
            num_bytes += len(taken[-1])
            at += 1
        return b"".join(taken), at

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._budget.num_bytes += num_bytes

    def _wake(self) -> None:
        more, self._more = self._more, trio.Event()
        more.set()


async def _next_slice(pieces: Iterator[bytes]) -> bytes:
    async with turn():
        return take_slice(pieces, MAX_WRITE_BYTES)


def _dropped(number: int) -> bytes:
    message = f"The events from number {number} on are no longer kept. The whole response can be retrieved."
    told = {"type": "error", "sequence_number": number, "code": "events_dropped", "message": message, "param": None}
    return b"event: error\ndata: " + json_for_line(told) + _END


def log_response(log: EventLog, at: int, options: AppOptions) -> Response:
    """Return a stream of the events from number `at` on."""
    response = Response(log.read(at, options.heartbeat_s), content_type=CONTENT_TYPE, headers=dict(HEADERS))
    response.timeout = None
    return response
