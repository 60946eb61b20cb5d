"""Logprobs of responses that are streamed in the background: now, later, and again from where a stream was cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from quipu.actors.messages.handler import Closed, ScoredDelta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.scores import LikelyToken, ScoredToken
from quipu.web.api.openai import stored_items
from quipu.web.api.openai.responses_reply import ResponseReply
from quipu.web.api.openai.responses_routes import ResponseReader
from quipu.web.api.openai.stream_log import EventLog, LogBudget
from quipu.web.api.stream import Stream
from quipu.web.http.sse import MAX_WRITE_BYTES
from quipu.web.request.tally import Tally
from tests.runtimes import eventually
from tests.web.api.openai.test_background import ENDED, follow, put, wait_status
from tests.web.api.openai.test_responses_answer import EVENT, read_events, stream
from tests.web.api.openai.test_responses_logprobs import WANTED, entry, mixed, texts
from tests.web.fakes import STARTED, FakeDesk, record, scripted
from tests.web.replies import reply_to
from tests.web.stored import Stored, storing
from tests.web.wires import wait_opened

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi", "background": True, "stream": True, **WANTED}
KEY = {"Authorization": "Bearer a"}


def scored(number: int, num_top: int = 0) -> ScoredDelta:
    """Return a delta of a token "ab"."""
    top = tuple(LikelyToken(10_000 + at, f"t{at}", b"t%d" % at, -1.0 - at, at + 1) for at in range(num_top))
    return ScoredDelta(0, "ab", 1, None, scores=(ScoredToken(number, "ab", b"ab", 2 * number, -0.5, 1, top),))


def told(events: list[Any]) -> list[tuple[str, list[Any]]]:
    """Return of each event its type, and the logprobs of all texts in it."""
    return [(event["type"], list(logprobs_in(event))) for event in events]


def logprobs_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "logprobs":
                yield inner
            else:
                yield from logprobs_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from logprobs_in(inner)


async def begin(stored: Stored) -> list[Any]:
    """Start a response and return the events of its stream."""
    async with stored.raw.open("POST", PATH, BODY, KEY) as exchange:
        assert await exchange.wait_started() == 200
        return read_events(await exchange.read())


async def test_same_as_in_the_foreground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event has the logprobs that it has in the foreground, as it comes and when it is read from the store, from
    any event on; so has the response.
    """
    expected = await stream(FakeDesk(scripted(*mixed())), **WANTED)
    assert sum(len(found) > 0 and found[0] != [] for _, found in told(expected)) > 8
    async with storing(tmp_path, FakeDesk(scripted(*mixed()))) as stored:
        live = await begin(stored)
        for event in live:
            EVENT.validate_python(event, strict=True)
        assert told(live) == told(expected)
        name = live[0]["response"]["id"]
        await eventually(lambda: stored.store.num_running() == 0, "it is stored")
        for at_once in (256, 1):
            monkeypatch.setattr("quipu.web.api.openai.responses_logprobs._STORED_AT_ONCE", at_once)
            assert await follow(stored, name) == live
        assert await follow(stored, name, 6) == live[7:]
        found = await stored.client.responses.retrieve(name)
    assert texts(found.model_dump()) == texts(live[-1]["response"]) == [("So é", "So é"), ("!?", "!?")]


async def test_followed_while_it_is_generated(tmp_path: Path) -> None:
    """Who reads while tokens come gets each with its logprobs, and who comes later all of them."""
    desk = FakeDesk(scripted(STARTED, scored(0)))
    async with storing(tmp_path, desk) as stored, trio.open_nursery() as nursery:
        seen: dict[int, list[Any]] = {}

        async def read(number: int) -> None:
            seen[number] = await (follow(stored, name, 3) if number else begin(stored))

        nursery.start_soon(read, 0)
        await wait_opened(desk)
        (name,) = (ticket.encode.request_id for ticket in desk.tickets)
        name = f"resp_{name}"
        nursery.start_soon(read, 1)
        await trio.testing.wait_all_tasks_blocked()
        put(stored, scored(1), scored(2))
        await trio.testing.wait_all_tasks_blocked()
        put(stored, *ENDED)
        await wait_status(stored, name, "completed")
    assert seen[1] == seen[0][4:]
    deltas = [event["logprobs"] for event in seen[0] if event["type"] == "response.output_text.delta"]
    assert deltas == [[entry(token)] for number in range(3) for token in scored(number).scores]
    assert texts(seen[0][-1]["response"]) == [("ababab", "ababab")]


async def test_cancelled(tmp_path: Path) -> None:
    """The stream of a cancelled response has the logprobs of what was said, also from the store."""
    async with storing(tmp_path, FakeDesk(scripted(STARTED, scored(0), scored(1)))) as stored:
        async with stored.raw.open("POST", PATH, BODY, KEY) as exchange:
            assert await exchange.wait_started() == 200
            data = await exchange.read_some()
            name = read_events(data)[0]["response"]["id"]
            exchange.leave()
        await stored.ask("POST", f"{PATH}/{name}/cancel")
        await wait_status(stored, name, "cancelled")
        await eventually(lambda: stored.store.num_running() == 0, "it is stored")
        events = await follow(stored, name)
    assert events[-1]["type"] == "response.incomplete"
    assert texts(events[-1]["response"]) == [("abab", "abab")]


async def test_too_many_to_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the response is stored without its logprobs, its events are too; whoever read them before got them all."""
    monkeypatch.setattr(stored_items, "MAX_LOGPROBS_BYTES", 300)
    async with storing(tmp_path, FakeDesk(scripted(*mixed()))) as stored:
        live = await begin(stored)
        name = live[0]["response"]["id"]
        await eventually(lambda: stored.store.num_running() == 0, "it is stored")
        later = await follow(stored, name)
    assert texts(live[-1]["response"]) == [("So é", "So é"), ("!?", "!?")]
    assert texts(later[-1]["response"]) == [("So é", ""), ("!?", "")]
    assert [(kind, [[] for _ in found]) for kind, found in told(live)] == told(later)


async def test_log_has_none_of_them() -> None:
    """A log of events whose logprobs are far larger keeps all of them, and fills them in a slice at a time."""
    reply = await reply_to(ResponseReader().read, {"input": "hi", "stream": True, **WANTED, "top_logprobs": 20})
    assert isinstance(reply, ResponseReply)
    log = EventLog(LogBudget(), max_bytes=1 << 18)
    writer = reply.log_writer(Stream(log, Tally(), structlog.get_logger()))
    log.fill = writer.fill
    deltas = [scored(number, 20) for number in range(500)]
    writer.consume([STARTED, *deltas, ScoredDelta(0, "", 0, FinishReason.LENGTH), Closed(record(), None)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.make)
        chunks = [chunk async for chunk in log.read(0, 60)]
        nursery.cancel_scope.cancel()
    assert log.first == 0 and len(log.joined()) < 1 << 18
    data = b"".join(chunks)
    assert len(data) > 10 << 18 and max(map(len, chunks)) < 4 * MAX_WRITE_BYTES
    events = read_events(data)
    assert events[-1]["type"] == "response.incomplete"
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert part["logprobs"] == [entry(token) for delta in deltas for token in delta.scores]
