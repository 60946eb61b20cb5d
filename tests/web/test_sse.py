"""The sink and the body that drains it."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from quipu.web.sse import PING, Sink, SinkOverflow, body, json_for_line


class Cut:
    """Counts how often a sink asked for its request to be ended."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_everything_there_is_one_write() -> None:
    """Chunks pushed while nobody waited come out together and in order; a finished sink ends the body."""
    sink = Sink(100, Cut())
    for data in (b"a", b"b", b"c"):
        sink.push(data)
    sink.finish()
    assert [data async for data in body(sink, 15.0)] == [b"abc"]


async def test_nothing_follows_the_end() -> None:
    """Pushes after the end are dropped."""
    sink = Sink(100, Cut())
    sink.push(b"a")
    sink.finish()
    sink.push(b"b")
    sink.finish()
    assert [data async for data in body(sink, 15.0)] == [b"a"]


async def test_limit_is_in_bytes_and_inclusive() -> None:
    """Exactly the limit fits; one byte more asks once for the request's end and drops what was there."""
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
    """What has been written no longer counts."""
    sink = Sink(10, Cut())
    for _ in range(5):
        sink.push(b"1234567890")
        assert sink.take_nowait() == b"1234567890"
    assert not sink.overflowed


async def test_overflow_wakes_a_waiting_body() -> None:
    """One chunk larger than the limit is an overflow too, and the body does not wait on."""
    sink = Sink(10, Cut())

    async def read() -> None:
        with pytest.raises(SinkOverflow):
            async for _ in body(sink, 15.0):
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        sink.push(b"12345678901")


async def test_a_push_at_the_heartbeat_is_not_lost(autojump_clock: trio.testing.MockClock) -> None:
    """A chunk that comes at the very moment of a heartbeat goes out, in whichever order."""
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


@pytest.mark.parametrize(
    "text", ["a\x85b", "a\u2028b\u2029c", "a\nb\r\x0b\x0c\x1cc", "\u2027\u202a é 漢 \U0001f600 \\u2028"]
)
def test_json_stays_one_line(text: str) -> None:
    """Whatever a client takes for the end of a line, and it is the same text for whoever reads JSON."""
    data = json_for_line({"text": text})
    assert json.loads(data) == {"text": text}
    assert len(data.decode().splitlines()) == 1
