"""Logprobs of responses: whole, streamed and stored, checked with the official client's types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import openai
import pytest
import structlog
from openai.types.responses import Response
from structlog.testing import capture_logs

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, ScoredDelta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.output import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Markup,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from quipu.actors.messages.scores import LikelyToken, ScoredToken
from quipu.web.api.openai import stored_items
from quipu.web.api.openai.responses_routes import ResponseReader
from quipu.web.api.stream import Stream
from quipu.web.app import make_app
from quipu.web.http.sse import Sink
from quipu.web.request.tally import Tally
from tests.runtimes import small_runtime
from tests.traps.wire import over_http
from tests.web.api.openai.test_openai_logprobs import HALF, HEL, scored, script
from tests.web.api.openai.test_responses_answer import BROKEN, EVENT, read_events, stream
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, record, scripted
from tests.web.replies import reply_to
from tests.web.stored import storing

PATH = "/v1/responses"
WANTED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
BODY: dict[str, Any] = {"model": "tiny", "input": "hi", **WANTED}


def scripted_text() -> list[OutletEvent]:
    """Play "Hel", half of a character, and a stop token that releases the held text."""
    return [_from_the_start(event) if isinstance(event, ScoredDelta) else event for event in script()]


def _from_the_start(delta: ScoredDelta) -> ScoredDelta:
    scores = tuple(msgspec.structs.replace(token, offset=token.offset - HEL.offset) for token in delta.scores)
    stop = 11 if delta.finish_reason is FinishReason.STOP else None
    return msgspec.structs.replace(delta, scores=scores, stop_token_id=stop)


def entry(token: ScoredToken) -> dict[str, Any]:
    """Return what a client gets of a token."""
    every: tuple[ScoredToken | LikelyToken, ...] = (token, *token.top)
    told = [{"token": one.text, "logprob": one.logprob, "bytes": list(one.utf8)} for one in every]
    return {**told[0], "top_logprobs": told[1:]}


def mixed() -> list[OutletEvent]:
    """Play reasoning, a text with half a character held back, a call, and a text that is cut."""
    tokens: list[tuple[bytes, int, tuple[OutputEvent, ...]]] = [
        (b"hm", 0, (ReasoningDelta("hm"),)),
        (b"</think>", 2, (Markup("</think>"),)),
        (b"So ", 10, (TextDelta("So "),)),
        (b"\xc3", 13, ()),
        (b"\xa9", 13, (TextDelta("é"),)),
        (b"f{}", 14, (CallBegin(0, "f", "f"), ArgumentsDelta(0, "{}", "{}"), CallEnd(0))),
        (b"!", 17, (TextDelta("!"),)),
        (b"?", 18, (TextDelta("?"),)),
    ]
    told = [
        ScoredDelta(0, "", 1, None, events=events, scores=(_token(number, utf8, offset),))
        for number, (utf8, offset, events) in enumerate(tokens)
    ]
    told[-1] = ScoredDelta(
        0, "", 1, FinishReason.LENGTH, events=tokens[-1][2], scores=(_token(len(tokens) - 1, *tokens[-1][:2]),)
    )
    return [STARTED, *told, Closed(record(), None)]


def _token(number: int, utf8: bytes, offset: int) -> ScoredToken:
    return ScoredToken(number, utf8.decode(errors="replace"), utf8, offset, -0.25 * number, 1, ())


def texts(body: Any) -> list[tuple[str, str]]:
    """Return the texts of a response, each with those of its tokens."""
    parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
    return [(part["text"], b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode()) for part in parts]


async def test_whole() -> None:
    """A text has the entries that chat has, but for the token that ends it, which is not shown."""
    _, answer = await Client(make_app(FakeDesk(scripted(*scripted_text())))).post(PATH, BODY)
    (part,) = answer["output"][0]["content"]
    assert part["text"] == "Hel\ufffd" and part["logprobs"] == [entry(HEL), entry(HALF)]
    assert answer["top_logprobs"] == 2
    Response.model_validate(answer, strict=True)


async def test_impossible_token() -> None:
    """A token that ends the text and is shown has an entry, and -9999 instead of an infinity."""
    body = {**BODY, "include_stop_str_in_output": True, "top_logprobs": 1}
    end = ScoredDelta(0, ".", 1, FinishReason.STOP, stop_token_id=5, scores=(scored(5, ".", 0, float("-inf")),))
    _, answer = await Client(make_app(FakeDesk(scripted(STARTED, end, Closed(record(), None))))).post(PATH, body)
    (told,) = answer["output"][0]["content"][0]["logprobs"]
    assert told == {"token": ".", "logprob": -9999.0, "bytes": [46], "top_logprobs": []}


async def test_line_breaks_of_unicode() -> None:
    """A stream has none of them within an event, in logprobs as little as in texts: some clients split there."""
    breaks = "\x85\u2028\u2029"
    end = ScoredDelta(0, breaks, 1, FinishReason.LENGTH, scores=(scored(5, breaks, 0, -1.0),))
    desk = FakeDesk(scripted(STARTED, end, Closed(record(), None)))
    async with Client(make_app(desk)).open("POST", PATH, {**BODY, "stream": True}) as exchange:
        assert await exchange.wait_started() == 200
        text = (await exchange.read()).decode()
    assert text.splitlines() == text.split("\n")[:-1] and text.count("\\u2028") > text.count('"logprobs":[{') > 0


async def test_only_on_request() -> None:
    """Without `include` there are none, and `top_logprobs` is named as without effect; 0 is the sampled token alone."""
    exchange, answer = await Client(make_app(FakeDesk())).post(PATH, {**BODY, "include": []})
    assert exchange.headers["x-quipu-ignored-fields"] == "top_logprobs"
    assert answer["output"][0]["content"][0]["logprobs"] == [] and answer["top_logprobs"] == 2
    desk = FakeDesk(scripted(*scripted_text()))
    exchange, answer = await Client(make_app(desk)).post(PATH, {**BODY, "top_logprobs": 0})
    assert "x-quipu-ignored-fields" not in exchange.headers
    assert [told["top_logprobs"] for told in answer["output"][0]["content"][0]["logprobs"]] == [[], []]
    assert desk.tickets[0].encode.sampling.logprobs == 0


@pytest.mark.parametrize("with_reasoning", [False, True])
async def test_streamed(with_reasoning: bool) -> None:
    """Every token of a text is in one delta, with the text that it completes; the events that repeat the text repeat
    its logprobs, and reasoning and calls have none.
    """
    events = await stream(FakeDesk(scripted(*mixed())), **WANTED, include_reasoning=with_reasoning)
    for event in events:
        EVENT.validate_python(event, strict=True)
    final = events[-1]["response"]
    assert texts(final) == [("So é", "So é"), ("!?", "!?")]
    for item in final["output"]:
        its = [event for event in events if event.get("item_id") == item["id"]]
        if item["type"] != "message":
            assert not any("logprobs" in event for event in its)
            continue
        told = [event for event in its if event["type"].endswith("text.delta")]
        logprobs = [one for event in told for one in event["logprobs"]]
        assert logprobs == item["content"][0]["logprobs"]
        for event in told:
            assert b"".join(bytes(one["bytes"]) for one in event["logprobs"]).decode() == event["delta"]
        ends = {event["type"]: event for event in its if event["type"].endswith(".done")}
        assert ends["response.output_text.done"]["logprobs"] == logprobs
        assert ends["response.content_part.done"]["part"] == item["content"][0]
        (done,) = [event for event in events if event.get("item") == item]
        assert done["type"] == "response.output_item.done"
    _, whole = await Client(make_app(FakeDesk(scripted(*mixed())))).post(
        PATH, {**BODY, "include_reasoning": with_reasoning}
    )
    assert whole["output"] == final["output"]


async def test_long_texts_are_told_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text has all its logprobs in each event, which is then made while its client reads it, in order."""
    monkeypatch.setattr("quipu.web.api.openai.responses_logprobs.MAX_ENTRIES", 2)
    monkeypatch.setattr("quipu.web.api.openai.logprobs.MAX_ENTRIES", 2)
    told = [ScoredDelta(0, "ab", 1, None, scores=(_token(at, b"ab", 2 * at),)) for at in range(20)]
    last = ScoredDelta(0, "ab", 1, FinishReason.LENGTH, scores=(_token(20, b"ab", 40),))
    events = await stream(FakeDesk(scripted(STARTED, *told, last, Closed(record(), None))), **WANTED)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert texts(events[-1]["response"]) == [("ab" * 21, "ab" * 21)]


async def test_failed_stream() -> None:
    """The last event of a stream that fails midway has what was sent, with its logprobs."""
    desk = FakeDesk(scripted(*mixed()[:4]))
    async with Client(make_app(desk)).open("POST", PATH, {**BODY, "stream": True}) as exchange:
        assert await exchange.wait_started() == 200
        ticket = desk.tickets[0]
        ticket.mailbox.put(BROKEN)
        data = await exchange.read()
    final = json.loads(data.decode().strip().split("data: ")[-1])
    assert final["type"] == "response.failed" and texts(final["response"]) == [("So ", "So ")]


async def test_crashed_stream_ends_in_pieces() -> None:
    """A stream that crashes midway repeats what was sent, with its logprobs, no more than a slice of it at once."""
    told = [ScoredDelta(0, "ab", 1, None, scores=(_token(at, b"ab", 2 * at),)) for at in range(1000)]
    reply = await reply_to(ResponseReader().read, {"input": "hi", "stream": True, **WANTED})
    sink, pushed = Sink(1 << 30, lambda: None), list[int]()
    writer = reply.writer(Stream(_Watched(sink, pushed), Tally(), structlog.get_logger()))
    with capture_logs() as crashes:
        writer.consume([STARTED, *told, Delta(0, "\ud800", 1, None)])
    assert [crash["event"] for crash in crashes] == ["stream.crashed"] and sink.finished
    assert max(pushed) < 4096
    data = b""
    while not sink.is_over:
        data += sink.take_nowait()
    events = read_events(data)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert texts(events[-1]["response"]) == [("ab" * 1000, "ab" * 1000)]


@attrs.frozen
class _Watched:
    """A sink whose pushes are measured."""

    sink: Sink
    pushed: list[int]

    @property
    def finished(self) -> bool:
        return self.sink.finished

    def push(self, data: bytes) -> None:
        self.pushed.append(len(data))
        self.sink.push(data)

    def push_slowly(self, chunks: Iterator[bytes]) -> None:
        self.sink.push_slowly(chunks)

    def finish(self) -> None:
        self.sink.finish()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_stored(tmp_path: Path, is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored response has its logprobs, also if it was made in the background; what continues it has none."""
    async with storing(tmp_path, FakeDesk(scripted(*mixed()))) as stored:
        client: openai.AsyncOpenAI = stored.client
        fields: Any = {"model": "tiny", "input": "hi", **WANTED}
        if is_streamed:
            given = [event async for event in await client.responses.create(**fields, stream=True)][-1].response
        else:
            given = await client.responses.create(**fields)
        assert texts(given.model_dump()) == [("So é", "So é"), ("!?", "!?")]
        assert await client.responses.retrieve(given.id, include=WANTED["include"]) == given
        await client.responses.create(model="tiny", input="more", previous_response_id=given.id)
        listed: Any = await client.responses.input_items.list(given.id)
        assert "logprobs" not in listed.data[0].content[0].model_dump(exclude_none=True)
        later = await client.responses.create(**fields, background=True)
        while later.status in ("queued", "in_progress"):
            later = await client.responses.retrieve(later.id)
        assert texts(later.model_dump()) == texts(given.model_dump())
        monkeypatch.setattr(stored_items, "MAX_LOGPROBS_BYTES", 300)
        large = await client.responses.create(**fields)
        assert texts(large.model_dump()) == texts(given.model_dump())
        found = await client.responses.retrieve(large.id)
        assert texts(found.model_dump()) == [("So é", ""), ("!?", "")]


async def test_served() -> None:
    """With a real engine, a response's logprobs are those of the same chat, bit for bit."""
    async with small_runtime() as runtime:
        client = over_http(runtime)
        fields = {"model": "demo", "temperature": 0, "ignore_eos": True}
        chat = {"messages": [{"role": "user", "content": "Hello there"}], "logprobs": True, "top_logprobs": 3}
        _, said = await client.post("/v1/chat/completions", {**fields, **chat, "max_tokens": 6})
        asked = {"input": "Hello there", "include": WANTED["include"], "top_logprobs": 3, "max_output_tokens": 6}
        _, answer = await client.post(PATH, {**fields, **asked})
    (part,) = answer["output"][0]["content"]
    assert part["text"] == said["choices"][0]["message"]["content"]
    assert part["logprobs"] == said["choices"][0]["logprobs"]["content"]
