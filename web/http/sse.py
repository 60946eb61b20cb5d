"""Server-sent events: the sink that a stream's chunks are pushed into, and the body that drains it.

The writing side (a renderer attached to a request's mailbox) pushes from the task that produced the token. While the
body waits, and where the server has given it a direct line to the client (`web/http/direct_write.py`), a chunk goes to
the socket within the push, and nobody is woken. Otherwise it joins a backlog that is bounded in bytes, and the body's
generator wakes once for everything that is there: a client that does not read is cut off, and stops nobody else. What
is large (a prompt that is echoed) is pushed as an iterator of chunks, which are made when the client has read those
before.

    push ──▶ line ──▶ socket                            the body waits, the kernel has room
      └────▶ backlog ──▶ body ──▶ Quart, h11 ──▶ socket    it does not, or there is no line

What must always hold: a chunk never overtakes another; no client is cut off that reads, however large an event is; the
generator owns nothing, since a client that leaves before its first step never runs its `finally`; ends and errors come
to it as bytes and a flag, so it returns normally unless the client was cut off.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

import orjson
import trio

from .direct_write import ChunkLine
from .turns import take_slice, turn
from .unread_limit import Shelf

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Caches must not keep a stream, and nginx must not gather it."""
MAX_WRITE_BYTES = 1 << 16
"""Of chunks that are made as they are read, in one write."""
MAX_JOINED_BYTES = 1 << 18
"""Of those that have waited, likewise: each layer of the generic way copies them."""
_LOOKS = 4
"""How often, in the time of a heartbeat, a body looks whether anything went out past it."""


def _nothing() -> None:
    pass


class SinkOverflow(Exception):
    """The client has not read for so long that its backlog is full. Raised by the body, so that the server cuts it."""


class Sink:
    """Chunks on their way to one client, at most `limit_bytes` of them.

    One event counts for half of that at most: where it is larger, that is the server's doing and not the client's.
    `push` and `finish` are synchronous and may come from any task. After an overflow or `finish` pushes are dropped.
    """

    __slots__ = (
        "_backlog",
        "_limit_bytes",
        "_line",
        "_num_bytes",
        "_on_overflow",
        "_shelf",
        "_wakeup",
        "_went_past",
        "finished",
        "overflowed",
    )

    def __init__(self, limit_bytes: int, on_overflow: Callable[[], None], shelf: Shelf | None = None) -> None:
        """`shelf`: where all sinks say what they keep; `close` has to be called then."""
        self._limit_bytes = limit_bytes
        self._shelf = Shelf(sys.maxsize) if shelf is None else shelf
        self._on_overflow = on_overflow
        self._backlog: deque[bytes | Iterator[bytes]] = deque()
        self._num_bytes = 0
        """Of those that are made, as they count."""
        self._line: ChunkLine | None = None
        self._went_past = False
        self._wakeup: trio.Event | None = None
        """Of a body that waits: all that came before is out. None from the moment in which it has something to do."""
        self.finished = False
        self.overflowed = False

    def push(self, data: bytes) -> None:
        if self.finished or self.overflowed or not data:  # an empty chunk would say that the body ends here
            return
        num_bytes = self._count(data)
        if self._num_bytes + num_bytes > self._limit_bytes:
            self.cut_off()
            return
        if self._wakeup is not None and self._line is not None:
            try:
                if not self._line.send_nowait(data):
                    self._wake()
                self._went_past = True
                return
            except trio.WouldBlock:
                pass
        self._backlog.append(data)
        self._num_bytes += num_bytes
        self._wake()
        self._shelf.put(self, len(data))

    def cut_off(self) -> None:
        """What waits is too much: drop it, and end the request."""
        self.overflowed = True
        end_request = self._on_overflow
        self.close()
        self._wake()
        # The generator is most likely stuck in a write, where no flag reaches it: the request itself has to end.
        end_request()

    def close(self) -> None:
        """Its request has ended: nothing is delivered any more, nor kept of what may still come."""
        self.finished = True
        self._backlog.clear()
        self._shelf.leave(self)
        # both know the request, which knows this: a cycle would be left to the collector
        self._line, self._on_overflow = None, _nothing

    def push_slowly(self, chunks: Iterator[bytes]) -> None:
        """Push `chunks`, each of which is made when it is about to be written. They do not count: none waits."""
        if not self.finished and not self.overflowed:
            self._backlog.append(chunks)
            self._wake()

    def _count(self, data: bytes) -> int:
        return min(len(data), max(1, self._limit_bytes // 2))

    def finish(self) -> None:
        """Nothing more will come; what is there is still delivered."""
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()
            self._wakeup = None

    def use(self, line: ChunkLine | None) -> None:
        """Chunks may take this line from now on, whenever the body waits. Called by the body."""
        self._line = line

    @property
    def is_idle(self) -> bool:
        """Nothing to deliver, but something may come."""
        has_rest = self._line is not None and self._line.has_rest
        return not (self._backlog or has_rest or self.finished or self.overflowed)

    @property
    def is_over(self) -> bool:
        """Everything is delivered, and nothing will come."""
        return self.finished and not self._backlog

    async def wait_not_idle(self) -> None:
        """Wait for something that is the body's to do. One waiter at a time."""
        if self.is_idle:
            self._wakeup = trio.Event()
            try:
                await self._wakeup.wait()
            finally:
                self._wakeup = None

    def take_went_past(self) -> bool:
        """Whether chunks went out past the body since this was last asked."""
        went_past, self._went_past = self._went_past, False
        return went_past

    async def flush(self) -> None:
        """Let a chunk that the line has begun be whole."""
        if self._line is not None:
            await self._line.flush()

    async def take(self) -> bytes:
        """As `take_nowait`, when it is this stream's turn where a chunk has to be made."""
        if self._backlog and not isinstance(self._backlog[0], bytes):
            async with turn():
                return self.take_nowait()
        return self.take_nowait()

    def take_nowait(self) -> bytes:
        """What is there, as one write: the chunks before one that has to be made, or some that are made now; no more
        than makes a write. Empty if there is nothing.

        Raises SinkOverflow.
        """
        if self.overflowed:
            raise SinkOverflow
        backlog = self._backlog
        while backlog and not isinstance(backlog[0], bytes):
            if data := take_slice(backlog[0], MAX_WRITE_BYTES):
                return data
            backlog.popleft()
        made: list[bytes] = []
        num_bytes = 0
        while backlog and isinstance(backlog[0], bytes) and num_bytes < MAX_JOINED_BYTES:
            made.append(backlog[0])
            num_bytes += len(made[-1])
            backlog.popleft()
        self._num_bytes -= sum(map(self._count, made))
        self._shelf.take(self, num_bytes)
        return made[0] if len(made) == 1 else b"".join(made)


async def body(
    sink: Sink,
    heartbeat_s: float,
    heartbeat: bytes = PING,
    open_line: Callable[[], ChunkLine | None] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Drain `sink`, one write a wake-up, with a `heartbeat` after every `heartbeat_s` of silence.

    Where chunks take a line past this body the silence may last a quarter longer. `open_line` is called once the
    response's head is out.
    """
    if open_line is not None:
        sink.use(open_line())
    num_silent_looks = 0
    while True:
        if sink.is_idle:
            # The scope is closed again before every yield: trio allows no other way.
            with trio.move_on_after(heartbeat_s / _LOOKS):
                await sink.wait_not_idle()
            if sink.is_idle:
                num_silent_looks = 0 if sink.take_went_past() else num_silent_looks + 1
                if num_silent_looks == _LOOKS:
                    num_silent_looks = 0
                    yield heartbeat
                continue
        num_silent_looks = 0
        if sink.overflowed:
            # Whoever was told of the overflow has most likely cancelled this request: then nothing needs to be raised.
            await trio.lowlevel.checkpoint()
        await sink.flush()
        data = await sink.take()
        if data:
            yield data
        elif sink.is_over:
            return


_LINE_BREAKS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}
"""In UTF-8, and as JSON escapes: characters that end a line for Unicode, though not for this protocol."""


def json_for_line(value: object) -> bytes:
    """JSON that stays one line for clients that split lines as Unicode has them."""
    data = orjson.dumps(value)
    if not data.isascii() and (b"\xc2\x85" in data or b"\xe2\x80" in data):
        for character, escape in _LINE_BREAKS.items():
            data = data.replace(character, escape)
    return data
