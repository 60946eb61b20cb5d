"""The sink, and the body that drains it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise

import attrs
import pytest
import trio
import trio.testing

from quipu.web.http.direct_write import DirectWriter
from quipu.web.http.sse import MAX_JOINED_BYTES, MAX_WRITE_BYTES, PING, Sink, SinkOverflow, body, json_for_line
from quipu.web.http.unread_limit import UnreadLimit


class Cut:
    """Counts how often a sink asked for its request to be ended."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_backlog_is_one_write() -> None:
    """Chunks pushed while nobody waits are written together and in order; a finished sink ends the body."""
    sink = Sink(100, Cut())
    for data in (b"a", b"b", b"c"):
        sink.push(data)
    sink.finish()
    assert [data async for data in body(sink, 15.0)] == [b"abc"]


async def test_pushes_after_end_are_dropped() -> None:
    """Pushes after the end are dropped."""
    sink = Sink(100, Cut())
    sink.push(b"a")
    sink.finish()
    sink.push(b"b")
    sink.finish()
    assert [data async for data in body(sink, 15.0)] == [b"a"]


async def test_limit_is_in_bytes_and_inclusive() -> None:
    """Exactly the limit fits; one byte more ends the request, once, and drops the backlog."""
    cut = Cut()
    sink = Sink(10, cut)
    sink.push(b"12345")
    sink.push(b"67890")
    assert not sink.overflowed
    sink.push(b"x")
    sink.push(b"y")
    assert sink.overflowed and cut.count == 1
    with pytest.raises(SinkOverflow):
        sink.take_nowait()


async def test_taking_makes_room() -> None:
    """Written chunks no longer count."""
    sink = Sink(10, Cut())
    for _ in range(5):
        sink.push(b"1234567890")
        assert sink.take_nowait() == b"1234567890"
    assert not sink.overflowed


async def test_large_event_is_not_an_overflow() -> None:
    """A client that reads is not cut off by an event larger than the limit; one that leaves large events unread is."""
    cut = Cut()
    sink = Sink(10, cut)
    for _ in range(3):
        sink.push(b"x" * 1000)
        sink.push(b"12345")
        assert sink.take_nowait() == b"x" * 1000 + b"12345"
    for _ in range(3):
        sink.push(b"x" * 1000)
    assert sink.overflowed and cut.count == 1


async def test_common_limit() -> None:
    """Beyond the common limit the client with most unread bytes is cut off; read and ended streams do not count."""
    unread_limit, cuts = UnreadLimit(100), [Cut() for _ in range(4)]
    sinks = [Sink(60, cut, unread_limit) for cut in cuts]
    for sink, num_bytes in zip(sinks, (20, 50, 30, 1), strict=True):
        sink.push(b"x" * num_bytes)
    assert [cut.count for cut in cuts] == [0, 1, 0, 0] and sinks[1].overflowed
    assert unread_limit.num_bytes == 51
    sinks[3].push(b"x" * 49)
    assert sinks[2].take_nowait() == b"x" * 30
    sinks[0].close()
    assert unread_limit.num_bytes == 50 and len(unread_limit) == 1
    sinks[2].push(b"x" * 50)
    assert [cut.count for cut in cuts] == [0, 1, 0, 0]
    for sink in sinks:
        sink.close()
    assert unread_limit.num_bytes == 0 and len(unread_limit) == 0


async def test_long_backlog_is_several_writes() -> None:
    """A client that resumes reading does not get everything in one write, which every layer would copy."""
    sink = Sink(10 << 20, Cut())
    for number in range(20):
        sink.push(b"%x" % (number % 16) * (MAX_JOINED_BYTES // 4))
    sink.finish()
    writes = [data async for data in body(sink, 15.0)]
    assert [len(data) for data in writes] == [MAX_JOINED_BYTES] * 5
    assert b"".join(writes)[:: MAX_JOINED_BYTES // 4] == b"0123456789abcdef0123"


async def test_slow_chunks_are_made_as_they_are_read() -> None:
    """Slow chunks are made one by one and do not count; what is pushed meanwhile follows them and counts."""
    made: list[int] = []

    def chunks() -> Iterator[bytes]:
        for number in range(5):
            made.append(number)
            yield b"%d" % number * MAX_WRITE_BYTES

    sink = Sink(10, Cut())
    sink.push(b"a")
    sink.push_slowly(chunks())
    sink.push(b"b")
    sink.finish()
    written = body(sink, 15.0)
    assert await anext(written) == b"a" and made == []
    for number in range(5):
        assert await anext(written) == b"%d" % number * MAX_WRITE_BYTES
        assert made == list(range(number + 1))
    assert [data async for data in written] == [b"b"]


async def test_overflow_wakes_a_waiting_body() -> None:
    """An overflow wakes a waiting body."""
    sink = Sink(10, Cut())

    async def read() -> None:
        with pytest.raises(SinkOverflow):
            async for _ in body(sink, 15.0):
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            sink.push(b"12345678901")


async def test_push_at_heartbeat_is_not_lost(autojump_clock: trio.testing.MockClock) -> None:
    """A chunk at the very moment of a heartbeat is written, in either order."""
    sink = Sink(100, Cut())
    seen: list[bytes] = []

    async def push() -> None:
        await trio.sleep(15.0)
        sink.push(b"a")
        await trio.sleep(1.0)
        sink.finish()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(push)
        seen.extend([data async for data in body(sink, 15.0)])
    assert [data for data in seen if data != PING] == [b"a"]


class FakeWriter(DirectWriter):
    """Keeps what is sent. If `is_full` it accepts nothing; if `is_partial` it accepts a part, once."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_full = False
        self.is_partial = False

    @property
    def has_remainder(self) -> bool:
        return self.is_partial

    def send_nowait(self, data: bytes) -> bool:
        if self.is_full:
            raise trio.WouldBlock
        self.sent.append(data)
        return not self.is_partial

    async def flush(self) -> None:
        if self.is_partial:
            self.sent.append(b"|")
            self.is_partial = False


@attrs.define(eq=False)
class Reading:
    """A body that is being read, with the clock's time of each write."""

    sink: Sink
    writer: FakeWriter
    seen: list[bytes] = attrs.field(factory=list)
    times: list[float] = attrs.field(factory=list)

    async def read(self) -> None:
        async for data in body(self.sink, 16.0, open_direct_writer=lambda: self.writer):
            self.seen.append(data)
            self.times.append(trio.current_time())


@asynccontextmanager
async def reading(limit_bytes: int = 100) -> AsyncIterator[Reading]:
    """Return a waiting body with a direct writer."""
    one = Reading(Sink(limit_bytes, Cut()), FakeWriter())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.read)
        await trio.testing.wait_all_tasks_blocked()
        yield one
        nursery.cancel_scope.cancel()


async def test_direct_writes_while_body_waits() -> None:
    """While the body waits, chunks are written directly and the body is not woken."""
    async with reading() as one:
        for data in (b"a", b"b", b"c"):
            one.sink.push(data)
        assert one.writer.sent == [b"a", b"b", b"c"]
        one.sink.finish()
    assert one.seen == []


async def test_no_direct_write_before_first_step() -> None:
    """Before the body's first step the response's head may not have been sent."""
    sink, writer = Sink(100, Cut()), FakeWriter()
    sink.push(b"a")
    sink.finish()
    assert [data async for data in body(sink, 15.0, open_direct_writer=lambda: writer)] == [b"a"]
    assert writer.sent == []


async def test_full_socket_falls_back_to_body() -> None:
    """From the first chunk that does not fit until the body waits again, all chunks go through the body, in order."""
    async with reading() as one:
        one.sink.push(b"a")
        one.writer.is_full = True
        one.sink.push(b"b")
        one.writer.is_full = False
        one.sink.push(b"c")
        assert one.writer.sent == [b"a"]
        await trio.testing.wait_all_tasks_blocked()
        assert one.seen == [b"bc"]
        one.sink.push(b"d")
        assert one.writer.sent == [b"a", b"d"]


async def test_remainder_precedes_later_chunks() -> None:
    """After a partial write the body flushes the remainder, then writes what has arrived meanwhile."""
    async with reading() as one:
        one.writer.is_partial = True
        one.sink.push(b"a")
        one.sink.push(b"b")
        assert one.writer.sent == [b"a"]
        await trio.testing.wait_all_tasks_blocked()
        assert one.writer.sent == [b"a", b"|"] and one.seen == [b"b"]
        one.writer.is_partial = True
        one.sink.push(b"c")
        one.sink.finish()
        await trio.testing.wait_all_tasks_blocked()
        assert one.writer.sent == [b"a", b"|", b"c", b"|"] and one.seen == [b"b"]


async def test_no_direct_write_after_cancellation() -> None:
    """Nothing is written directly after the body has ended: the connection may serve another request."""
    async with reading() as one:
        pass
    one.sink.push(b"a")
    assert one.writer.sent == []


async def test_limit_counts_what_direct_writer_leaves() -> None:
    """Chunks for which the kernel has no room count towards the limit."""
    async with reading(limit_bytes=10) as one:
        one.writer.is_full = True
        for _ in range(3):
            one.sink.push(b"12345")
        assert one.sink.overflowed and one.writer.sent == []


async def test_heartbeat_after_silence_only(autojump_clock: trio.testing.MockClock) -> None:
    """Direct writes are not silence; after the last one the heartbeat is at most 25 % late."""
    async with reading() as one:
        for _ in range(10):
            await trio.sleep(10.5)
            one.sink.push(b"a")
        last = trio.current_time()
        assert one.seen == []
        await trio.sleep(60.0)
        silences = [later - earlier for earlier, later in pairwise([last, *one.times])]
        assert one.seen == [PING] * 3 and all(16.0 <= silence <= 20.0 for silence in silences)


async def test_heartbeat_of_a_silent_stream_is_on_time(autojump_clock: trio.testing.MockClock) -> None:
    """Without direct writes the heartbeat is exactly on time."""
    async with reading() as one:
        began = trio.current_time()
        await trio.sleep(33.0)
        assert [time - began for time in one.times] == [16.0, 32.0]


@pytest.mark.parametrize(
    "text", ["a\x85b", "a\u2028b\u2029c", "a\nb\r\x0b\x0c\x1cc", "\u2027\u202a é 漢 \U0001f600 \\u2028"]
)
def test_json_stays_one_line(text: str) -> None:
    """The JSON contains no line break of any kind, and decodes to the same text."""
    data = json_for_line({"text": text})
    assert json.loads(data) == {"text": text}
    assert len(data.decode().splitlines()) == 1
