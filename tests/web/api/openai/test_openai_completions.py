"""`/v1/completions`: what reaches the desk, and whole and streamed responses."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from quipu.actors.messages.handler import Closed, Delta, OfPrompt, ScoredDelta, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.prompts import InfillPrompt, TextPrompt, TokenPrompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, hello, record, scripted

PATH = "/v1/completions"
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "total_tokens": 43,
    "prompt_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "audio_tokens": 0,
    },
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "once", **fields}


async def test_whole_response() -> None:
    """Text, finish reason and the usage of the record; the id contains the server's id."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(PATH, body())
    assert exchange.status == 200
    assert answer.pop("created") > 0
    assert answer == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    assert desk.ticket.num_starts == desk.ticket.num_leaves == 1


async def test_stream_without_usage() -> None:
    """Usage is sent only if requested; the last chunk has the finish reason."""
    exchange, chunks = await Client(make_app(FakeDesk())).stream(PATH, body(stream=True))
    assert exchange.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert exchange.headers["cache-control"] == "no-store"
    assert exchange.headers["x-accel-buffering"] == "no"
    assert exchange.ended
    assert chunks.pop() == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {"cmpl-r1"}


async def test_stream_with_usage() -> None:
    """Usage is null in every chunk but the last, which has no choices and the usage of a whole response."""
    _, chunks = await Client(make_app(FakeDesk())).stream(
        PATH, body(stream=True, stream_options={"include_usage": True})
    )
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"] == USAGE
    assert [chunk["usage"] for chunk in chunks] == [None] * 3


async def test_always_include_usage() -> None:
    """The operator can include usage in every stream."""
    app = make_app(FakeDesk(), AppOptions(always_include_usage=True))
    _, chunks = await Client(app).stream(PATH, body(stream=True))
    assert chunks[-2]["usage"] == USAGE


async def test_continuous_usage() -> None:
    """Every chunk has the sums so far, including tokens without text; the last one has those of the record.

    Without `include_usage`, no chunk has any.
    """
    events = [
        Started(16, 0, 16),
        Delta(0, "a", 1, None),
        Delta(1, "", 1, None),
        Started(40, 32, 16),
        Delta(1, "b", 2, None),
        Delta(0, "", 1, FinishReason.LENGTH),
        Delta(1, "", 0, FinishReason.STOP),
        Closed(record(completion_tokens=5, cache_write_tokens=16), None),
    ]
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = body(prompt=["x", "y"], stream=True, stream_options=options)
    _, chunks = await Client(make_app(FakeDesk(scripted(*events)))).stream(PATH, request)
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 45
    seen = [
        (
            chunk["usage"]["prompt_tokens"],
            chunk["usage"]["prompt_tokens_details"]["cached_tokens"],
            chunk["usage"]["prompt_tokens_details"]["cache_write_tokens"],
            chunk["usage"]["completion_tokens"],
            chunk["usage"]["total_tokens"],
        )
        for chunk in chunks
    ]
    assert seen == [(16, 0, 16, 1, 17), (40, 32, 16, 4, 44), (40, 32, 16, 5, 45), (40, 32, 16, 5, 45)]

    request["stream_options"] = {**options, "include_usage": False}
    _, without = await Client(make_app(FakeDesk(scripted(*events)))).stream(PATH, request)
    assert [chunk["choices"] for chunk in without[:-1]] == [chunk["choices"] for chunk in chunks]
    assert all("usage" not in chunk for chunk in without[:-1])


async def test_usage_beside_the_ids_of_a_prompt() -> None:
    """A chunk with the ids of a prompt has the sums of its place in the stream, whenever its client reads it."""
    prompt = ScoredDelta(0, "", 0, None, of_prompt=OfPrompt(token_ids=range(3)))
    events = [STARTED, prompt, Delta(0, "a", 2, None), Delta(0, "", 1, FinishReason.LENGTH), Closed(record(), None)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = body(stream=True, stream_options=options, return_token_ids=True)
    _, chunks = await Client(make_app(FakeDesk(scripted(*events)))).stream(PATH, request)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [0, 1, 2]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [0, 2, 3, 3]


async def test_tiers() -> None:
    """On request cached tokens are split by tier; the parts add up, and unknown ones are unattributed."""
    closed = Closed(record(cached_by_tier={"device": 16, "host": 8}), None)
    script = scripted(*hello()[:-1], closed)
    _, answer = await Client(make_app(FakeDesk(script))).post(PATH, body(return_cached_tokens_details=True))
    tiers = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert tiers == {"device": 16, "host": 8, "disk": 0, "remote": 0, "unattributed": 8}


async def test_zero_is_zero_and_disputed_is_answered() -> None:
    """A miss is 0, not null; a disputed account's numbers are reported as they are."""
    closed = Closed(record(cached_tokens=0, disputed=True), None)
    exchange, answer = await Client(make_app(FakeDesk(scripted(*hello()[:-1], closed)))).post(PATH, body())
    assert exchange.status == 200
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_unknown_is_not_zero() -> None:
    """An unknown count is absent or null, not 0."""
    closed = Closed(record(cached_tokens=None, cache_write_tokens=None), None)
    _, answer = await Client(make_app(FakeDesk(scripted(*hello()[:-1], closed)))).post(PATH, body())
    details = answer["usage"]["prompt_tokens_details"]
    assert details == {"cache_write_tokens": None, "audio_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_lists_and_choices(stream: bool) -> None:
    """Choice n of prompt p has index p * num_choices + n."""
    desk = FakeDesk()
    client = Client(make_app(desk))
    request = body(prompt=["x", "y"], n=2)
    if stream:
        _, chunks = await client.stream(PATH, {**request, "stream": True})
        texts: dict[int, str] = {}
        for chunk in chunks[:-1]:
            (choice,) = chunk["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == dict.fromkeys(range(4), "Hello")
    else:
        _, answer = await client.post(PATH, request)
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(i, "Hello") for i in range(4)]
    assert desk.ticket.encode.prompts == (TextPrompt("x"), TextPrompt("y"))
    assert desk.ticket.encode.num_choices == 2


async def test_stream_and_whole_agree() -> None:
    """The same events give the same text, finish reason and usage, streamed or not."""
    client = Client(make_app(FakeDesk()))
    _, whole = await client.post(PATH, body())
    _, chunks = await client.stream(PATH, body(stream=True, stream_options={"include_usage": True}))
    choices = [chunk["choices"][0] for chunk in chunks[:-2]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", (TextPrompt("text"),)),
        ("", (TextPrompt(""),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2, 99], (TokenPrompt((1, 2, 99)),)),
        ([[1], [0, 2]], (TokenPrompt((1,)), TokenPrompt((0, 2)))),
    ],
)
async def test_prompt_forms(prompt: Any, expected: Any) -> None:
    """All four forms of a prompt reach the tokenizer."""
    desk = FakeDesk()
    await Client(make_app(desk)).post(PATH, body(prompt=prompt))
    assert desk.ticket.encode.prompts == expected
    assert desk.ticket.encode.prompt_param == "prompt"


async def test_prompts_with_a_gap() -> None:
    """One suffix follows the gap after each of the texts; an empty one is none."""
    desk = FakeDesk()
    client = Client(make_app(desk))
    await client.post(PATH, body(prompt=["a", ""], suffix="z"))
    await client.post(PATH, body(prompt="a", suffix=""))
    gaps, none = (ticket.encode.prompts for ticket in desk.tickets)
    assert gaps == (InfillPrompt("a", "z", "suffix"), InfillPrompt("", "z", "suffix"))
    assert none == (TextPrompt("a"),)


async def test_parameters_reach_the_desk() -> None:
    """Every parameter reaches the desk, with the endpoint and the server's id."""
    desk = FakeDesk()
    request = body(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        max_tokens=7,
        stop="END",
        stop_token_ids=[3],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        user="someone",
        something_else={"entirely": True},
        best_of=1,
    )
    exchange, _ = await Client(make_app(desk, AppOptions(domain="d"))).post(PATH, request)
    assert exchange.status == 200
    encode = desk.ticket.encode
    assert desk.ticket.endpoint == PATH
    assert encode.request_id == exchange.headers["x-quipu-request-id"] == "r1"
    assert encode.sampling == SamplingParams(
        max_tokens=7, temperature=0, top_p=0.5, top_k=0, min_p=0.1, seed=2**64 - 1, stop_token_ids=(3,), ignore_eos=True
    )
    assert (encode.max_tokens, encode.stop, encode.include_stop, encode.skip_special_tokens) == (
        7,
        ("END",),
        True,
        False,
    )
    assert (encode.domain, encode.max_tokens_param) == ("d", "max_tokens")


async def test_defaults() -> None:
    """Null means absent; without a seed each request gets its own."""
    desk = FakeDesk()
    client = Client(make_app(desk))
    await client.post(PATH, body(temperature=None, n=None, stop=None, stream=None, seed=None, stream_options=None))
    await client.post(PATH, body())
    first, second = (ticket.encode for ticket in desk.tickets)
    assert first.max_tokens == 16 and first.num_choices == 1 and first.stop == ()
    assert first.sampling.temperature == 1.0 and first.skip_special_tokens and not first.include_stop
    assert first.sampling.seed != second.sampling.seed
    assert 0 <= first.sampling.seed < 2**64


async def test_openai_types_know_every_field() -> None:
    """OpenAI's types accept the response and its chunks, and find no unknown field."""
    client = Client(make_app(FakeDesk()))
    _, answer = await client.post(PATH, body())
    _, chunks = await client.stream(PATH, body(stream=True, stream_options={"include_usage": True}))
    for item in (answer, chunks[-2]):
        parsed = Completion.model_validate(item)
        assert not parsed.model_extra
        assert parsed.usage is not None and not parsed.usage.model_extra
        assert parsed.usage.prompt_tokens_details is not None
        assert parsed.usage.prompt_tokens_details.cached_tokens == 32
        assert not parsed.usage.prompt_tokens_details.model_extra
