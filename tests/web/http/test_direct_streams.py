"""Chunks written to the socket past the response body: the same bytes and the same ends as through the body."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import trio
import trio.testing

from quipu.actors.messages.handler import Closed, Delta, OutletEvent
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.web.http.server import ServerConfig
from tests.web.fakes import STARTED, FakeDesk, hello, record, scripted
from tests.web.wires import (
    PATIENCE_S,
    SURFACES,
    DirectWriters,
    WritePath,
    accepts,
    both_write_paths,
    fails,
    put_one_by_one,
    serving,
    wait_left,
    wait_opened,
    writers,
)

__all__ = ["writers"]

BROKE = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
WORDS = [Delta(0, text, 1, None) for text in ("a ", "\u00e9\u2028 ", "", "b" * 300, " c")]
SCRIPTS: dict[str, list[OutletEvent]] = {
    "finished": [*WORDS, Delta(0, "d", 1, FinishReason.LENGTH), Closed(record(), None)],
    "failed": [*WORDS, BROKE],
    "cannot be encoded": [*WORDS[:2], Delta(0, "\ud800", 1, None), *WORDS, Closed(record(), None)],
    "nothing but its end": [Delta(0, "", 1, FinishReason.STOP), Closed(record(), None)],
    "stopped": [*WORDS, Delta(0, "d", 1, FinishReason.STOP, "stop!"), Closed(record(), None)],
}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES = [
    *((path, name, {}) for path in SURFACES for name in SCRIPTS),
    *((path, "finished", USAGE) for path in list(SURFACES)[:2]),
]


async def exchange(write_path: WritePath, path: str, script: list[OutletEvent], fields: dict[str, Any]) -> bytes:
    """Return all bytes of a response whose events came one by one, without those that depend on the time of day."""
    desk = FakeDesk(scripted(STARTED))
    async with serving(desk, write_path.options()) as served:
        peer = await served.connect()
        await peer.ask(path, **fields)
        await peer.read_until(b"HTTP/1.1 200")
        await put_one_by_one(desk, script)
        data = await peer.read_until(b"\r\n0\r\n\r\n")
        await peer.stream.aclose()
    data = re.sub(rb"\r\ndate: [^\r]*", b"", data)
    return re.sub(rb'("(?:created|completed)(?:_at)?"):\d+', rb"\1:0", data)


@pytest.mark.parametrize(("path", "name", "fields"), CASES, ids=lambda value: str(value)[:40])
async def test_same_bytes(writers: DirectWriters, path: str, name: str, fields: dict[str, Any]) -> None:
    """Head, framing, events and end equal those of the generic path, byte for byte."""
    generic = await exchange(WritePath.GENERIC, path, SCRIPTS[name], fields)
    assert writers.num_opened == 0
    direct = await exchange(WritePath.DIRECT, path, SCRIPTS[name], fields)
    assert writers.num_sends > 0
    assert direct == generic
    assert direct.endswith(b"\r\n0\r\n\r\n")


@both_write_paths
async def test_two_choices_with_logprobs(writers: DirectWriters, write_path: WritePath) -> None:
    """All choices of a step arrive, each in its order."""
    desk = FakeDesk(scripted(STARTED))
    async with serving(desk, write_path.options()) as served:
        peer = await served.connect()
        await peer.ask("/v1/completions", n=2, logprobs=1)
        await put_one_by_one(desk, hello(2)[1:])
        data = await peer.read_stream()
        await peer.stream.aclose()
    for index in (0, 1):
        chunks = re.findall(rb'"index":%d,"text":"(\w*)"' % index, data)
        assert chunks == [b"Hel", b"lo", b""]
    assert (writers.num_sends > 0) == (write_path is WritePath.DIRECT)


@both_write_paths
@pytest.mark.parametrize("path", SURFACES)
async def test_events_without_output(writers: DirectWriters, write_path: WritePath, path: str) -> None:
    """Events without output end no stream, neither by an empty chunk nor by an empty write."""
    desk = FakeDesk(scripted(STARTED))
    async with serving(desk, write_path.options()) as served:
        peer = await served.connect()
        await peer.ask(path)
        await put_one_by_one(desk, [STARTED, STARTED, *WORDS, STARTED, Delta(0, "", 1, None), *SCRIPTS["finished"]])
        data = await peer.read_stream()
        await peer.stream.aclose()
    assert data.count(b"b" * 300) >= 2 and b'"d"' in data


@pytest.mark.parametrize("seed", range(8))
async def test_partial_writes(writers: DirectWriters, seed: int) -> None:
    """Whether the kernel takes none, part or all of a chunk, the client gets every event once and in order."""
    rng = random.Random(seed)
    writers.kernel = accepts(*(rng.choice([None, None, 0, 1, 2, 5, 100]) for _ in range(50)))
    desk = FakeDesk(scripted(STARTED))
    async with serving(desk, WritePath.DIRECT.options()) as served:
        peer = await served.connect()
        await peer.ask("/v1/completions")
        await wait_opened(desk)
        for number in range(100):
            desk.ticket.mailbox.put(Delta(0, f"<{number}>", 1, None))
            if rng.random() < 0.7:
                await trio.testing.wait_all_tasks_blocked()
        desk.ticket.mailbox.put(Closed(record(), None))
        data = await peer.read_stream()
        await peer.stream.aclose()
    assert re.findall(rb"<(\d+)>", data) == [b"%d" % number for number in range(100)]
    assert data.endswith(b"data: [DONE]\n\n")
    assert writers.num_sends > 20


@pytest.mark.parametrize("when", ["first", "later"])
async def test_failing_send(writers: DirectWriters, when: str) -> None:
    """The ticket is left once and its connection reset; the producer of the tokens is not affected."""
    desk = FakeDesk(scripted(STARTED))
    async with serving(desk, WritePath.DIRECT.options()) as served:
        peer = await served.connect()
        await peer.ask("/v1/completions")
        await put_one_by_one(desk, [] if when == "first" else WORDS)
        writers.kernel = fails
        for _ in range(3):
            desk.ticket.mailbox.put(Delta(0, "x", 1, None))
        await wait_left(desk)
        desk.ticket.mailbox.put(Delta(0, "y", 1, None))
        assert not (await peer.read_until(b"never")).endswith(b"0\r\n\r\n")
        assert desk.ticket.num_leaves == 1
        other = await served.connect()  # the other streams are complete
        writers.kernel = accepts(None)
        await other.ask("/v1/completions")
        await wait_opened(desk, 2)
        desk.tickets[1].mailbox.put(Closed(record(), None))
        assert (await other.read_stream()).endswith(b"[DONE]\n\n")
        for each in (peer, other):
            await trio.aclose_forcefully(each.stream)


@both_write_paths
@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("num_read", [0, 2])
async def test_client_disconnects(writers: DirectWriters, write_path: WritePath, how: str, num_read: int) -> None:
    """The ticket is left once and at once, even without tokens; later tokens are ignored."""
    desk = FakeDesk(scripted(STARTED))
    async with serving(desk, write_path.options()) as served:
        num_tasks = trio.lowlevel.current_statistics().tasks_living
        peer = await served.connect()
        await peer.ask("/v1/completions")
        await put_one_by_one(desk, WORDS[:num_read])
        if how == "half":
            await peer.stream.send_eof()
        elif how == "reset":
            linger = (1).to_bytes(4, "little") + bytes(4)
            peer.stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger)
            peer.stream.socket.close()
        else:
            await peer.stream.aclose()
        with trio.fail_after(PATIENCE_S):
            while desk.ticket.num_leaves == 0 or trio.lowlevel.current_statistics().tasks_living > num_tasks:
                await trio.sleep(0.001)
        for _ in range(3):
            desk.ticket.mailbox.put(Delta(0, "x", 1, None))
            await trio.testing.wait_all_tasks_blocked()
        assert desk.ticket.num_leaves == 1
        await trio.aclose_forcefully(peer.stream)


@both_write_paths
async def test_slow_reader_gets_everything(writers: DirectWriters, write_path: WritePath) -> None:
    """A reader within the limit gets every event, in order."""
    desk = FakeDesk(scripted(STARTED))
    text = "x" * 20_000
    async with serving(desk, write_path.options()) as served:
        peer = await served.connect(receive_bytes=4096)
        await peer.ask("/v1/completions")
        await wait_opened(desk)
        for number in range(150):
            desk.ticket.mailbox.put(Delta(0, f"<{number}>{text}", 1, None))
            await trio.lowlevel.checkpoint()
        assert not desk.ticket.num_leaves
        desk.ticket.mailbox.put(Closed(record(), None))
        data = await peer.read_stream()
        await peer.stream.aclose()
    assert re.findall(rb"<(\d+)>", data) == [b"%d" % number for number in range(150)]
    if write_path is WritePath.DIRECT:
        assert 0 < writers.num_sends < 150, "the slow reader must fall behind"


@both_write_paths
async def test_slow_reader_does_not_delay_others(writers: DirectWriters, write_path: WritePath) -> None:
    """While one stream is not read, the others get every token as it is made."""
    desk = FakeDesk(scripted(STARTED))
    async with serving(desk, write_path.options(sink_limit_bytes=2_000_000)) as served:
        slow = await served.connect(receive_bytes=4096)
        peers = [slow, *[await served.connect() for _ in range(7)]]
        for num_before, peer in enumerate(peers):
            await peer.ask("/v1/completions")
            await wait_opened(desk, num_before + 1)
        num_steps = 0
        while desk.tickets[0].num_leaves == 0:
            num_steps += 1
            for ticket in desk.tickets:  # the slow reader is the first in each step
                ticket.mailbox.put(Delta(0, f"<{num_steps}>" + "x" * 20_000, 1, None))
            for peer in peers[1:]:
                assert (await peer.read_until(b"x" * 20_000)).count(b"<") == 1
                assert peer.received.count(b"<") == 0
        assert 2_000_000 < num_steps * 20_000 < 40_000_000
        assert [ticket.num_leaves for ticket in desk.tickets] == [1] + [0] * 7
        for peer in peers:
            await trio.aclose_forcefully(peer.stream)


@both_write_paths
async def test_connection_is_reused(writers: DirectWriters, write_path: WritePath) -> None:
    """The next response on a connection begins where the stream ended, even if its request arrived earlier."""
    desk = FakeDesk()
    async with serving(desk, write_path.options()) as served:
        peer = await served.connect()
        for path in SURFACES:
            await peer.ask(path)
        answers = [await peer.read_stream() for _ in SURFACES]
        await peer.stream.aclose()
    assert [b"Hel" in answer for answer in answers] == [True] * len(SURFACES)
    assert peer.received == b""


async def test_http_1_0_uses_generic_path(writers: DirectWriters) -> None:
    """Without chunks there is no direct writer: the response ends with its connection."""
    desk = FakeDesk()
    async with serving(desk, WritePath.DIRECT.options()) as served:
        peer = await served.connect()
        await peer.ask("/v1/completions", version="1.0")
        data = await peer.read_until(b"never")
        await peer.stream.aclose()
    assert data.endswith(b"\n\ndata: [DONE]\n\n") and writers.num_opened == 0


async def test_garbage_while_a_stream_runs(writers: DirectWriters) -> None:
    """Once a connection is closing, no byte of the stream follows, and its request is left."""
    desk = FakeDesk(scripted(STARTED))
    async with serving(desk, WritePath.DIRECT.options()) as served:
        peer = await served.connect()
        await peer.ask("/v1/completions")
        await put_one_by_one(desk, WORDS)
        await peer.read_until(b" c")
        await peer.stream.send_all(b"x" * (ServerConfig().max_pipelined_bytes + 1))
        await wait_left(desk)
        num_sends = writers.num_sends
        desk.ticket.mailbox.put(Delta(0, "z", 1, None))
        rest = await peer.read_until(b"never")
        assert b"z" not in rest and desk.ticket.num_leaves == 1 and writers.num_sends == num_sends
        await trio.aclose_forcefully(peer.stream)
