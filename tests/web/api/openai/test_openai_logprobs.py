"""Logprobs and echo in completions and chat, from scripted events to the client's own types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from quipu.actors.messages.handler import Closed, Delta, OfPrompt, OutletEvent, ScoredDelta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.scores import LikelyToken, ScoredToken
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, columns, record, scripted

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def likely(token_id: int, text: str, logprob: float, rank: int) -> LikelyToken:
    return LikelyToken(token_id, text, text.encode(), logprob, rank)


def scored(token_id: int, text: str, offset: int, logprob: float | None, *top: LikelyToken) -> ScoredToken:
    rank = None if logprob is None else next((t.rank for t in top if t.token_id == token_id), 9)
    return ScoredToken(token_id, text, text.encode(), offset, logprob, rank, top)


FIRST = scored(4, "To", 0, None)
PROMPT = scored(5, " be", 2, -0.5, likely(5, " be", -0.5, 1), likely(6, " go", -1.5, 2))
HEL = scored(7, "Hel", 5, -3.0, likely(8, "Ho", -0.25, 1), likely(9, "Hu", -2.0, 2))
# half of a character: its text is a replacement character, its bytes are its own
HALF = ScoredToken(10, "�", b"\xc3", 8, -0.75, 1, (LikelyToken(10, "�", b"\xc3", -0.75, 1),))
END = scored(11, "<end>", 8, -math.inf, likely(9, "Hu", -0.125, 1), likely(12, "Hu", -2.5, 2))


def script(*prompt: ScoredToken, echo: str = "") -> Sequence[OutletEvent]:
    """Play the prompt if it is requested, then "Hel", half of a character, and a stop token that releases the held
    text.
    """
    first = [ScoredDelta(0, echo, 0, None, of_prompt=OfPrompt(columns(*prompt)))] if prompt or echo else []
    return [
        STARTED,
        *first,
        ScoredDelta(0, "Hel", 1, None, None, scores=(HEL,)),
        ScoredDelta(0, "", 1, None, None, scores=(HALF,)),
        ScoredDelta(0, "�", 1, FinishReason.STOP, None, scores=(END,)),
        Closed(record(), None),
    ]


async def whole(path: str, events: Sequence[OutletEvent], **fields: Any) -> dict[str, Any]:
    return dict((await answered(path, events, **fields))["choices"][0])


async def answered(path: str, events: Sequence[OutletEvent], **fields: Any) -> dict[str, Any]:
    exchange, answer = await Client(make_app(FakeDesk(scripted(*events)))).post(path, body(path, **fields))
    assert exchange.status == 200, answer
    assert len(answer["choices"]) == 1
    if not fields.get("echo"):  # the client's type does not allow the null of a prompt's first token
        (Completion if path == COMPLETIONS else ChatCompletion).model_validate(answer)
    return dict(answer)


async def streamed(path: str, events: Sequence[OutletEvent], **fields: Any) -> list[dict[str, Any]]:
    desk = FakeDesk(scripted(*events))
    _, chunks = await Client(make_app(desk)).stream(path, body(path, stream=True, **fields))
    assert chunks.pop() == "[DONE]"
    if path == CHAT:  # the client has no type for a completion chunk
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk)
    return [chunk["choices"][0] for chunk in chunks]


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt_field = {"prompt": "To be"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "To be"}]}
    return {"model": "tiny", **prompt_field, **fields}


async def test_completion() -> None:
    """Lists are parallel; the sampled token is included even if it is not among the top; JSON has no infinity."""
    choice = await whole(COMPLETIONS, script(), logprobs=2)
    assert choice["text"] == "Hel�"
    assert choice["logprobs"] == {
        "tokens": ["Hel", "�", "<end>"],
        "token_logprobs": [-3.0, -0.75, -9999.0],
        "top_logprobs": [
            {"Ho": -0.25, "Hu": -2.0, "Hel": -3.0},
            {"�": -0.75},
            {"Hu": -0.125, "<end>": -9999.0},  # two tokens with the same text: the more likely one is shown
        ],
        "text_offset": [5, 8, 8],
    }
    assert "prompt_logprobs" not in choice


async def test_sampled_token_among_others_of_its_text() -> None:
    """A half character has the logprob of its own token, not that of a likelier one with the same text."""
    other = LikelyToken(13, "�", b"\xc4", -0.25, 1)
    events = [
        STARTED,
        ScoredDelta(0, "", 1, FinishReason.LENGTH, None, scores=(msgspec.structs.replace(HALF, top=(other,)),)),
    ]
    choice = await whole(COMPLETIONS, [*events, Closed(record(), None)], logprobs=1)
    assert choice["logprobs"]["top_logprobs"] == [{"�": -0.75}]
    choice = await whole(COMPLETIONS, [*events, Closed(record(), None)], logprobs=1, return_tokens_as_token_ids=True)
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:13": -0.25, "token_id:10": -0.75}]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tokens_as_ids(is_streamed: bool) -> None:
    """With vLLM's extension tokens are named by their ids, which are unique; everything else is unchanged."""

    async def told(path: str, **fields: Any) -> list[dict[str, Any]]:
        if not is_streamed:
            return [(await whole(path, script(FIRST, PROMPT, echo="To be"), **fields))["logprobs"]]
        choices = await streamed(path, script(FIRST, PROMPT, echo="To be"), **fields)
        return [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]

    completions = {"logprobs": 2, "echo": True}
    for named, plain in zip(
        await told(COMPLETIONS, **completions, return_tokens_as_token_ids=True),
        await told(COMPLETIONS, **completions, return_tokens_as_token_ids=False),
        strict=True,
    ):
        by_text = {token.text: f"token_id:{token.token_id}" for token in (FIRST, PROMPT, HEL, HALF, END)}
        assert named["tokens"] == [by_text[text] for text in plain["tokens"]]
        assert {**named, "tokens": None, "top_logprobs": None} == {**plain, "tokens": None, "top_logprobs": None}
        if named["tokens"][-1] == "token_id:11":
            assert named["top_logprobs"][-1] == {"token_id:9": -0.125, "token_id:12": -2.5, "token_id:11": -9999.0}
    chat = {"logprobs": True, "top_logprobs": 2}
    content = [entry for part in await told(CHAT, **chat, return_tokens_as_token_ids=True) for entry in part["content"]]
    texts = [entry for part in await told(CHAT, **chat) for entry in part["content"]]
    assert [entry["token"] for entry in content] == ["token_id:7", "token_id:10", "token_id:11"]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in content] == [
        ["token_id:8", "token_id:9"], ["token_id:10"], ["token_id:9", "token_id:12"],
    ]  # fmt: skip
    assert [entry["bytes"] for entry in content] == [entry["bytes"] for entry in texts]


async def test_no_more_logprobs_than_requested() -> None:
    """A response has only as many logprobs as requested, even if the engine computed more; 0 is the sampled token's
    only.
    """
    choice = await whole(COMPLETIONS, script(FIRST, PROMPT), logprobs=0, prompt_logprobs=1)
    assert choice["logprobs"]["top_logprobs"] == [{"Hel": -3.0}, {"�": -0.75}, {"<end>": -9999.0}]
    assert choice["prompt_logprobs"] == [None, {"5": {"logprob": -0.5, "rank": 1, "decoded_token": " be"}}]


async def test_logprobs_not_requested() -> None:
    """Without `logprobs` the field is null, whatever the engine reports."""
    for path in (COMPLETIONS, CHAT):
        choice = await whole(path, script(FIRST, PROMPT))
        assert choice["logprobs"] is None and "prompt_logprobs" not in choice
        assert all(choice["logprobs"] is None for choice in await streamed(path, script(FIRST, PROMPT)))


async def test_echo() -> None:
    """The prompt comes first, in the text and in the logprobs; its first token has none."""
    choice = await whole(COMPLETIONS, script(FIRST, PROMPT, echo="To be"), logprobs=2, echo=True)
    assert choice["text"] == "To beHel�"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["To", " be", "Hel", "�", "<end>"]
    assert logprobs["token_logprobs"][:3] == [None, -0.5, -3.0]
    assert logprobs["top_logprobs"][:2] == [None, {" be": -0.5, " go": -1.5}]
    assert logprobs["text_offset"] == [0, 2, 5, 8, 8]
    alone = await whole(COMPLETIONS, script(FIRST, echo="To be"), echo=True)
    assert alone["text"] == "To beHel�" and alone["logprobs"] is None


async def test_echo_without_output() -> None:
    """With `max_tokens` 0 there are only the prompt's logprobs, and no completion token."""
    desk = FakeDesk(
        scripted(
            STARTED,
            ScoredDelta(0, "To be", 0, None, of_prompt=OfPrompt(columns(FIRST, PROMPT))),
            Delta(0, "", 0, FinishReason.LENGTH),
            Closed(record(completion_tokens=0), None),
        )
    )
    fields = body(COMPLETIONS, logprobs=2, echo=True, max_tokens=0)
    _, answer = await Client(make_app(desk)).post(COMPLETIONS, fields)
    (choice,) = answer["choices"]
    assert choice["text"] == "To be" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["To", " be"]
    assert answer["usage"]["completion_tokens"] == 0
    assert desk.ticket.encode.max_tokens == 0 and desk.ticket.encode.echo
    _, chunks = await Client(make_app(desk)).stream(COMPLETIONS, {**fields, "stream": True})
    assert [chunk["choices"][0]["logprobs"] is None for chunk in chunks[:-1]] == [False, True]


async def test_chat() -> None:
    """Each token is an object with its own text and bytes, and as many top tokens as requested."""
    choice = await whole(CHAT, script(), logprobs=True, top_logprobs=1)
    hel, half, end = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert hel == {
        "token": "Hel",
        "logprob": -3.0,
        "bytes": [72, 101, 108],
        "top_logprobs": [{"token": "Ho", "logprob": -0.25, "bytes": [72, 111]}],
    }
    assert half["token"] == "�" and half["bytes"] == [0xC3]
    assert end["logprob"] == -9999.0
    own = await whole(CHAT, script(), logprobs=True)
    assert [token["top_logprobs"] for token in own["logprobs"]["content"]] == [[], [], []]


async def test_chat_prompt_logprobs() -> None:
    """The extension `prompt_logprobs` is keyed by token id: null for the first token, and the prompt's own token with
    its rank. All choices have the prompt in common, so that it is beside them.
    """
    answer = await answered(CHAT, script(PROMPT), prompt_logprobs=2)
    (choice,) = answer["choices"]
    assert choice["logprobs"] is None and "prompt_logprobs" not in choice
    assert answer["prompt_logprobs"] == [
        None,
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": " be"},
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": " go"},
        },
    ]


async def test_streamed_completion() -> None:
    """The lists of all chunks concatenated are those of the whole response; a token without text has its own chunk."""
    events = script(FIRST, PROMPT, echo="To be")
    choices = await streamed(COMPLETIONS, events, logprobs=2, echo=True)
    assert [choice["text"] for choice in choices] == ["To be", "Hel", "", "�"]
    joined: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for choice in choices:
        for name, values in choice["logprobs"].items():
            joined[name] += values
    assert joined == (await whole(COMPLETIONS, events, logprobs=2, echo=True))["logprobs"]


async def test_streamed_chat() -> None:
    """Each token's logprobs are in a delta with `content`, which is empty while no text can be released."""
    choices = await streamed(CHAT, script(), logprobs=True, top_logprobs=2)
    scored_choices = [choice for choice in choices if choice["logprobs"] is not None]
    assert [choice["delta"]["content"] for choice in scored_choices] == ["Hel", "", "�"]
    content = [token for choice in scored_choices for token in choice["logprobs"]["content"]]
    assert content == (await whole(CHAT, script(), logprobs=True, top_logprobs=2))["logprobs"]["content"]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "fields", "logprobs", "prompt_logprobs", "echo"),
    [
        (COMPLETIONS, {}, None, None, False),
        (COMPLETIONS, {"logprobs": False, "prompt_logprobs": False}, None, None, False),
        (COMPLETIONS, {"logprobs": 0}, 0, None, False),
        (COMPLETIONS, {"logprobs": 20}, 20, None, False),
        (COMPLETIONS, {"echo": True}, None, None, True),
        (COMPLETIONS, {"echo": True, "logprobs": 3}, 3, 3, True),
        (COMPLETIONS, {"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 3, 5, True),
        (COMPLETIONS, {"prompt_logprobs": 0}, None, 0, False),
        (CHAT, {}, None, None, False),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None, None, False),
        (CHAT, {"logprobs": True}, 0, None, False),
        (CHAT, {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 1}, 20, 1, False),
    ],
)
async def test_what_reaches_the_desk(
    path: str, fields: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None, echo: bool
) -> None:
    """Each field reaches the desk as the number of logprobs to compute; for prompts only if they are returned."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(path, body(path, **fields))
    assert exchange.status == 200, answer
    encode = desk.ticket.encode
    assert (encode.sampling.logprobs, encode.sampling.prompt_logprobs, encode.echo) == (logprobs, prompt_logprobs, echo)
