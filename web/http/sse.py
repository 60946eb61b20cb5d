"""Server-sent events: the sink that a stream's chunks are pushed into, and the body that drains it.

A stream writer pushes from the task that produced the token. While the body waits, and if it has a direct writer
(`web/http/direct_write.py`), a chunk is written to the socket within the push, and no task is woken. Otherwise it joins
a backlog that is bounded in bytes, for which the body's generator wakes up once: a client that does not read is cut
off. Large output (an echoed prompt) is pushed as an iterator of chunks, each made when the client has read the last.

    push ──▶ direct writer ──▶ socket                   the body waits, and the kernel has room
      └────▶ backlog ──▶ body ──▶ Quart, h11 ──▶ socket    otherwise, or without a direct writer

What must always hold: no chunk overtakes another; a client that reads is never cut off, however large an event is; the
generator owns nothing, since a client that leaves before its first step never runs its `finally`; ends and errors reach
it as bytes and a flag, so it returns normally unless the client was cut off.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

import orjson
import trio

from .direct_write import DirectWriter
from .turns import take_slice, turn
from .unread_limit import UnreadLimit

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Caches must not store a stream, and nginx must not buffer it."""
MAX_WRITE_BYTES = 1 << 16
"""Bytes per write, for chunks that are encoded while the client reads."""
MAX_JOINED_BYTES = 1 << 18
"""Bytes per write, for chunks from the backlog, which each layer of the generic path copies."""
_CHECKS_PER_HEARTBEAT = 4
"""How many times per heartbeat interval a body checks whether chunks were written directly."""
ROOM_BYTES = 64 * 1024
"""Backlog up to which a source that can be slowed goes on."""


class SinkOverflow(Exception):
    """The backlog is full: the client has not read for too long. Raised by the body, so that the server cuts it off."""


class Sink:
    """Chunks on their way to one client, at most `limit_bytes` of them.

    One event counts for at most half of that, since its size is not the client's doing. `push` and `finish` may be
    called from any task. After an overflow or `finish`, pushes are dropped.
    """

    __slots__ = (
        "_backlog",
        "_direct_writer",
        "_limit_bytes",
        "_num_bytes",
        "_on_overflow",
        "_room",
        "_unread_limit",
        "_wakeup",
        "_wrote_directly",
        "finished",
        "overflowed",
    )

    def __init__(
        self, limit_bytes: int, on_overflow: Callable[[], None], unread_limit: UnreadLimit | None = None
    ) -> None:
        """With an `unread_limit`, which all sinks report to, `close` must be called in the end."""
        self._limit_bytes = limit_bytes
        self._unread_limit = UnreadLimit(sys.maxsize) if unread_limit is None else unread_limit
        self._on_overflow = on_overflow
        self._backlog: deque[bytes | Iterator[bytes]] = deque()
        self._num_bytes = 0
        """What the finished chunks of the backlog count for (`_count`)."""
        self._direct_writer: DirectWriter | None = None
        self._wrote_directly = False
        self._room: trio.Event | None = None
        """Set when part of the backlog has been taken; None if nobody waits for that."""
        self._wakeup: trio.Event | None = None
        """Set while the body waits and all earlier chunks are out."""
        self.finished = False
        self.overflowed = False

    def push(self, data: bytes) -> None:
        if self.finished or self.overflowed or not data:  # an empty chunk would end the body
            return
        num_bytes = self._count(data)
        if self._num_bytes + num_bytes > self._limit_bytes:
            self.cut_off()
            return
        if self._wakeup is not None and self._direct_writer is not None:
            try:
                if not self._direct_writer.send_nowait(data):
                    self._wake()
                self._wrote_directly = True
                return
            except trio.WouldBlock:
                pass
        self._backlog.append(data)
        self._num_bytes += num_bytes
        self._wake()
        self._unread_limit.add(self, len(data))

    async def wait_room(self) -> None:
        """Wait until the client has read most of the backlog. One waiter."""
        while self._num_bytes > ROOM_BYTES and not self.finished and not self.overflowed:
            self._room = trio.Event()
            await self._room.wait()

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    def cut_off(self) -> None:
        """Drop the backlog, which has become too large, and end the request."""
        self.overflowed = True
        end_request = self._on_overflow
        self.close()
        self._wake()
        # The generator is probably stuck in a write: the request itself has to end.
        end_request()

    def close(self) -> None:
        """Deliver nothing more and drop later pushes: the request has ended."""
        self.finished = True
        self._backlog.clear()
        self._make_room()
        self._unread_limit.discard(self)
        # Both refer to the request, which refers to this sink: the cycle would be left to the garbage collector.
        self._direct_writer, self._on_overflow = None, lambda: None

    def push_slowly(self, chunks: Iterator[bytes]) -> None:
        """Push `chunks`, each made when it is about to be written, so that none counts as waiting."""
        if not self.finished and not self.overflowed:
            self._backlog.append(chunks)
            self._wake()

    def _count(self, data: bytes) -> int:
        return min(len(data), max(1, self._limit_bytes // 2))

    def finish(self) -> None:
        """End the stream. What has been pushed is still delivered."""
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()
            self._wakeup = None

    def use(self, direct_writer: DirectWriter | None) -> None:
        """Write chunks directly from now on, whenever the body waits. Called by the body."""
        self._direct_writer = direct_writer

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to deliver, but something may still come."""
        has_remainder = self._direct_writer is not None and self._direct_writer.has_remainder
        return not (self._backlog or has_remainder or self.finished or self.overflowed)

    @property
    def is_over(self) -> bool:
        """Whether everything is delivered, and nothing more will come."""
        return self.finished and not self._backlog

    async def wait_not_idle(self) -> None:
        """Wait until the body has something to do. One waiter at a time."""
        if self.is_idle:
            self._wakeup = trio.Event()
            try:
                await self._wakeup.wait()
            finally:
                self._wakeup = None

    def take_wrote_directly(self) -> bool:
        """Return whether chunks were written directly since the last call."""
        wrote_directly, self._wrote_directly = self._wrote_directly, False
        return wrote_directly

    async def flush(self) -> None:
        """Complete a chunk that the direct writer has begun."""
        if self._direct_writer is not None:
            await self._direct_writer.flush()

    async def take(self) -> bytes:
        """Do as `take_nowait`, but wait for this stream's turn if a chunk has to be made."""
        if self._backlog and not isinstance(self._backlog[0], bytes):
            async with turn():
                return self.take_nowait()
        return self.take_nowait()

    def take_nowait(self) -> bytes:
        """Return the bytes for one write: the finished chunks at the front, or some that are encoded now.

        Empty if there is nothing. Raises SinkOverflow.
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
        self._unread_limit.subtract(self, num_bytes)
        self._make_room()
        return made[0] if len(made) == 1 else b"".join(made)


async def body(
    sink: Sink,
    heartbeat_s: float,
    heartbeat: bytes = PING,
    open_direct_writer: Callable[[], DirectWriter | None] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Drain `sink`, one write per wake-up, with a `heartbeat` after every `heartbeat_s` of silence.

    If chunks are written directly, heartbeats may be up to 25 % late. `open_direct_writer` is called once the head of
    the response has been sent.
    """
    if open_direct_writer is not None:
        sink.use(open_direct_writer())
    num_silent_checks = 0
    while True:
        if sink.is_idle:
            # The scope is closed before every yield, as trio requires.
            with trio.move_on_after(heartbeat_s / _CHECKS_PER_HEARTBEAT):
                await sink.wait_not_idle()
            if sink.is_idle:
                num_silent_checks = 0 if sink.take_wrote_directly() else num_silent_checks + 1
                if num_silent_checks == _CHECKS_PER_HEARTBEAT:
                    num_silent_checks = 0
                    yield heartbeat
                continue
        num_silent_checks = 0
        if sink.overflowed:
            # The overflow has probably cancelled this request by now; then nothing needs to be raised.
            await trio.lowlevel.checkpoint()
        await sink.flush()
        data = await sink.take()
        if data:
            yield data
        elif sink.is_over:
            return


_LINE_BREAKS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}
"""Characters that end a line in Unicode but not in this protocol: in UTF-8, and as JSON escapes."""


def json_for_line(value: object) -> bytes:
    """Encode as JSON that stays on one line, also for clients that split at every line break of Unicode."""
    return on_one_line(orjson.dumps(value))


def on_one_line(data: bytes) -> bytes:
    """Escape what ends a line in Unicode in the texts of some JSON."""
    if not data.isascii() and (b"\xc2\x85" in data or b"\xe2\x80" in data):
        for character, escape in _LINE_BREAKS.items():
            data = data.replace(character, escape)
    return data
