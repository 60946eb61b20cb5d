"""Responses with thousands of scored tokens, whole or streamed: they are made in pieces that block the loop only
briefly.

The expected content comes from a straightforward encoder (`expected_*`) that makes all of it at once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from quipu.actors.messages.handler import Closed, Delta, OfPrompt, OutletEvent, ScoredDelta
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd
from quipu.actors.messages.scores import LikelyToken, ScoredToken
from quipu.web.api.answer import Reader
from quipu.web.api.anthropic.routes import read_message
from quipu.web.api.content import MAX_LOOSE_PIECES
from quipu.web.api.openai.logprobs import MAX_ENTRIES
from quipu.web.api.openai.responses_items import OutputItems
from quipu.web.api.openai.responses_routes import read as read_response
from quipu.web.api.openai.routes import read_chat
from quipu.web.api.stream import Stream, Transcript
from quipu.web.api.whole_response import whole_response
from quipu.web.app import make_app
from quipu.web.http import turns
from quipu.web.http.sse import Sink
from quipu.web.options import AppOptions
from quipu.web.request.tally import Tally
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, columns, record, scripted
from tests.web.outputs import script as script_of
from tests.web.replies import reply_to, whole_pieces

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
NUM_TOKENS, NUM_TOP = 8000, 20
NUM_CALLS = 300
WORDS = [f"w{index}\u2028é" for index in range(500)]


@cache
def prompt() -> tuple[ScoredToken, ...]:
    """Return 8,000 scored prompt tokens with twenty top tokens each, as reported for a prompt that is echoed."""
    draw, offset, tokens = random.Random(1), 0, []
    for at in range(NUM_TOKENS):
        token_id = draw.randrange(500)
        top = tuple(
            LikelyToken(other, WORDS[other], WORDS[other].encode(), -draw.random(), rank)
            for rank, other in enumerate(draw.sample(range(500), NUM_TOP), start=1)
        )
        word = WORDS[token_id]
        logprob = -draw.random() if at else None
        tokens.append(ScoredToken(token_id, word, word.encode(), offset, logprob, at or None, top if at else ()))
        offset += len(word)
    return tuple(tokens)


def text_of(tokens: tuple[ScoredToken, ...]) -> str:
    return "".join(token.text for token in tokens)


def script(num_choices: int = 1) -> list[OutletEvent]:
    """Play a prompt that each choice echoes, and one output token for each."""
    shared, text, last = columns(*prompt()), text_of(prompt()), prompt()[-1]
    events: list[OutletEvent] = [STARTED]
    for index in range(num_choices):
        events.append(ScoredDelta(index, text, 0, None, of_prompt=OfPrompt(shared)))
        events.append(ScoredDelta(index, last.text, 1, FinishReason.LENGTH, None, scores=(last,)))
    return [*events, Closed(record(), None)]


def expected_completion(tokens: tuple[ScoredToken, ...]) -> dict[str, Any]:
    top = []
    for token in tokens:
        by_text: dict[str, Any] = {}
        for other in token.top:
            by_text.setdefault(other.text, other.logprob)
        by_text[token.text] = token.logprob
        top.append(None if token.logprob is None else by_text)
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": top,
    }


def expected_prompt(tokens: tuple[ScoredToken, ...]) -> list[Any]:
    def with_likeliest(token: ScoredToken) -> list[Any]:
        return [token, *token.top]

    return [
        None
        if token.logprob is None
        else {
            str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.text}
            for one in with_likeliest(token)
        }
        for token in tokens
    ]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", "echo": True, "max_tokens": 1, **fields}


async def test_streamed_echo() -> None:
    """The echo exceeds the sink's limit, but no client that reads is cut off; the joined chunks equal the whole
    response.
    """
    app = make_app(FakeDesk(scripted(*script())), AppOptions(sink_limit_bytes=1 << 20))
    _, chunks = await Client(app).stream(COMPLETIONS, body(logprobs=NUM_TOP, stream=True))
    assert chunks.pop() == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert sum(len(json.dumps(choice)) for choice in choices) > 4 << 20
    assert "".join(choice["text"] for choice in choices) == text_of(prompt()) + prompt()[-1].text
    joined: dict[str, list[Any]] = {name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")}
    for choice in choices:
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]), (
            "each chunk must have the logprobs of its own text"
        )
        assert len(choice["logprobs"]["tokens"]) * (NUM_TOP + 1) <= MAX_ENTRIES
        for name, values in choice["logprobs"].items():
            joined[name] += values
    assert joined == expected_completion((*prompt(), prompt()[-1]))
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


@pytest.mark.parametrize("num_chars", [0, 5, 100_000])
async def test_streamed_echo_without_logprobs(num_chars: int) -> None:
    """There are chunks with text alone; their usage is that of the moment of the echo."""
    text = ("quipu\u2028" * num_chars)[:num_chars]
    events: list[OutletEvent] = [
        STARTED,
        ScoredDelta(0, text, 0, None, of_prompt=OfPrompt(columns(prompt()[0]))),
        Delta(0, "!", 1, FinishReason.LENGTH),
        Closed(record(), None),
    ]
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = await Client(make_app(FakeDesk(scripted(*events)))).stream(
        COMPLETIONS, body(stream=True, stream_options=options)
    )
    with_text = [chunk for chunk in chunks[:-1] if chunk["choices"]]
    assert "".join(chunk["choices"][0]["text"] for chunk in with_text) == text + "!"
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in with_text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in with_text]
    assert counts == [0] * (len(with_text) - 1) + [1] and (len(with_text) > 2) == (num_chars > 1000)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_whole_response(num_choices: int) -> None:
    """The JSON is the same as if made at once; since it is larger than one piece it has no Content-Length."""
    app = make_app(FakeDesk(scripted(*script(num_choices))))
    exchange, answer = await Client(app).post(
        COMPLETIONS, body(logprobs=NUM_TOP, prompt_logprobs=NUM_TOP, n=num_choices)
    )
    assert exchange.status == 200 and "content-length" not in exchange.headers
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage"]
    for index, choice in enumerate(answer["choices"]):
        assert choice == {
            "index": index,
            "text": text_of(prompt()) + prompt()[-1].text,
            "logprobs": expected_completion((*prompt(), prompt()[-1])),
            "finish_reason": "length",
            "prompt_logprobs": expected_prompt(prompt()),
        }


async def test_whole_chat_response() -> None:
    """Logprobs of thousands of output tokens and of the prompt; the prompt's first token is null."""
    outputs = [ScoredDelta(0, token.text, 1, None, None, scores=(token,)) for token in prompt()[1:]]
    end = Delta(0, "", 0, FinishReason.LENGTH)
    events = [STARTED, Delta(0, "", 0, None), *outputs, end, Closed(record(), None)]
    events.insert(1, ScoredDelta(0, "", 0, None, of_prompt=OfPrompt(columns(*prompt()[1:]))))
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    chat |= {"logprobs": True, "top_logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP}
    _, answer = await Client(make_app(FakeDesk(scripted(*events)))).post(CHAT, chat)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text_of(prompt()[1:])
    assert answer["prompt_logprobs"] == expected_prompt(prompt())

    def entry(one: ScoredToken | LikelyToken) -> dict[str, Any]:
        return {"token": one.text, "logprob": one.logprob, "bytes": list(one.utf8)}

    assert choice["logprobs"]["content"] == [
        {**entry(token), "top_logprobs": [entry(other) for other in token.top]} for token in prompt()[1:]
    ]


async def test_small_response_has_a_content_length() -> None:
    """A response of one piece has a Content-Length, for HTTP/1.0 clients and proxies."""
    events = [STARTED, Delta(0, "x", 1, FinishReason.STOP), Closed(record(), None)]
    exchange, _ = await Client(make_app(FakeDesk(scripted(*events)))).post(COMPLETIONS, body())
    assert "content-length" in exchange.headers


class Clock:
    """A fake clock that stands for the time spent on making pieces."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


async def test_slices_of_responses_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ten large responses at once, one slice is made per round of the loop, so no task waits for more than one."""
    clock = Clock()
    monkeypatch.setattr("quipu.web.http.turns.time.perf_counter", clock.perf_counter)
    latest = [0.0]

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            clock.now += 0.001
            yield b"x"

    async def neighbour() -> None:
        while True:
            latest.append(clock.now)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(neighbour)
        async with trio.open_nursery() as answers:
            for _ in range(10):
                answers.start_soon(whole_response, pieces())
        nursery.cancel_scope.cancel()
    assert clock.now == pytest.approx(0.4)
    assert max(b - a for a, b in pairwise(latest)) < 3 * turns.SLICE_S


async def test_text_of_many_pieces_is_kept_as_one() -> None:
    """Released text is not kept as a string per token, nor copied as a whole for each of them."""
    transcript = Transcript(Tally())
    for number in range(20_000):
        transcript.consume([Delta(0, f"{number} ", 1, None)])
        assert transcript.content(0).blocks[0].text.num_pieces <= MAX_LOOSE_PIECES + 1
    assert transcript.content(0).text == "".join(f"{number} " for number in range(20_000))


async def test_kept_scores_are_columns() -> None:
    """Scores take twelve bytes per top token and a little per position, for prompts and outputs."""
    transcript = Transcript(Tally())
    for token in prompt():
        transcript.consume([ScoredDelta(0, token.text, 1, None, None, scores=(token,))])
    assert transcript.scores[0].num_bytes <= NUM_TOKENS * (12 * (NUM_TOP + 1) + 12)
    assert tuple(transcript.scores[0].tokens(0, NUM_TOKENS, NUM_TOP)) == prompt()


def many_calls() -> list[OutletEvent]:
    """Play an output of nothing but calls."""
    calls = [[CallBegin(n, "f"), ArgumentsDelta(n, "{}"), CallEnd(n)] for n in range(NUM_CALLS)]
    return script_of(*(event for call in calls for event in call), reason=FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("read", "body"), [(read_chat, MESSAGES), (read_message, MESSAGES), (read_response, {"input": "x"})]
)
async def test_whole_response_of_many_calls(read: Reader, body: dict[str, Any]) -> None:
    """A model that opens calls for ever holds the loop no longer than any other: no piece has more than one call."""
    reply = await reply_to(read, body)
    pieces = whole_pieces(reply, many_calls())
    assert len(pieces) > NUM_CALLS and max(map(len, pieces)) < 2000
    assert str(json.loads(b"".join(pieces))).count("'f'") == NUM_CALLS


@pytest.mark.parametrize("error", [None, RequestError(ErrorKind.INTERNAL, "engine died")])
async def test_streamed_response_of_many_calls(error: RequestError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last event of a streamed response, which repeats all items, is made while the client reads."""
    *events, closed = many_calls()
    reply = await reply_to(read_response, {"input": "x", "stream": True})
    sink = Sink(1 << 30, lambda: None)
    writer = reply.writer(Stream(sink, Tally(), structlog.get_logger()))
    writer.consume(events)
    while sink.take_nowait():
        pass
    made: list[int] = []

    def make(_items: OutputItems, number: int, *_: object) -> dict[str, Any]:
        made.append(number)
        return {"number": number}

    monkeypatch.setattr(OutputItems, "item", make)
    writer.consume([closed if error is None else Closed(record(outcome=Outcome.FAILED), error)])
    assert sink.finished and not made
    data = b""
    while not sink.is_over:
        data += sink.take_nowait()
    last = json.loads(data.rpartition(b"data: ")[2])
    assert [item["number"] for item in last["response"]["output"]] == made == list(range(NUM_CALLS))
