"""`truncate_prompt_tokens`: prompts that are shortened, through every actor and over HTTP."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import trio

from quipu.actors.messages.prompts import Breakpoint, CacheTtl, PartSpan, TextPrompt, Truncation
from quipu.actors.tokenizer.prompt_encoder import EncodedPrompt
from quipu.actors.tokenizer.truncation import shortened_chat, shortened_ids, shortened_text
from tests.actors.test_pooled_over_http import EMBED, SCORE, ids_of, post, vector
from tests.fake_oracle import embedding
from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import CHAT, COMPLETIONS, body, over_http, prompt_of, settle

LONG = "A cord with a knot, and another knot, and many more of them. " * 12


async def test_completions(autojump_clock: trio.abc.Clock) -> None:
    """The last tokens of ids and of texts are kept, from either end if the client says; usage is that of what is left,
    which is cached like the same prompt by itself.
    """
    ids = prompt_of(60, seed=3)
    kept: dict[str, Any] = {"max_tokens": 2, "return_token_ids": True, "temperature": 0}
    async with small_runtime() as client:
        whole = await post(client, COMPLETIONS, prompt=ids[-40:], **kept)
        short = await post(client, COMPLETIONS, prompt=ids, truncate_prompt_tokens=40, **kept)
        first = await post(client, COMPLETIONS, prompt=ids, truncate_prompt_tokens=40, truncation_side="right", **kept)
        text = await post(client, COMPLETIONS, prompt=LONG, truncate_prompt_tokens=30, **kept)
        same = await post(client, COMPLETIONS, prompt=ids[:9], truncate_prompt_tokens=40, **kept)
        await settle(client)
    assert short["choices"][0] == whole["choices"][0] and first["choices"][0]["prompt_token_ids"] == ids[:40]
    assert text["choices"][0]["prompt_token_ids"] == ids_of(LONG)[-30:]
    assert same["choices"][0]["prompt_token_ids"] == ids[:9]
    assert short["usage"]["prompt_tokens"] == 40
    assert short["usage"]["prompt_tokens_details"]["cached_tokens"] == full_blocks(39) > 0


async def test_chat_that_does_not_fit(autojump_clock: trio.abc.Clock) -> None:
    """With -1, a chat that is longer than the context is served with as much of its end as leaves room for the output;
    what shows its tokens shows those, and a look-up finds them.
    """
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": LONG * 4}], "max_tokens": 5, "temperature": 0}
    async with small_runtime(max_model_len=128) as client:
        refused = await post(client, CHAT, status=400, **chat)
        answer = await post(client, CHAT, **chat, truncate_prompt_tokens=-1, return_token_ids=True)
        read = await post(client, "/tokenize", **chat, truncate_prompt_tokens=-1)
        everything = await post(client, "/tokenize", **chat)
        asked = {"url": CHAT, "body": {"model": "demo", **chat, "truncate_prompt_tokens": -1}}
        _, looked_up = await over_http(client).post("/v1/cache/lookup", asked)
        again = await post(client, CHAT, **chat, truncate_prompt_tokens=-1)
        await settle(client)
    assert refused["error"]["code"] == "context_length_exceeded"
    assert answer["usage"]["prompt_tokens"] == 123 == read["count"]
    assert answer["prompt_token_ids"] == read["tokens"] == everything["tokens"][-123:]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert looked_up["prompts"][0]["cached_tokens"] == cached == full_blocks(122) > 0


async def test_embeddings(autojump_clock: trio.abc.Clock) -> None:
    """An embedding is that of the beginning, unless the client wants the end."""
    async with small_runtime(**EMBED) as client:
        first = await post(client, "/v1/embeddings", input=[LONG, "Rain."], truncate_prompt_tokens=20)
        last = await post(client, "/v1/embeddings", input=LONG, truncate_prompt_tokens=20, truncation_side="left")
        score = await post(client, "/v1/score", text_1="Rain.", text_2=LONG, truncate_prompt_tokens=20)
    ids, rain = ids_of(LONG), vector("Rain.")
    first_20, last_20 = (np.frombuffer(embedding(part), np.float32) for part in (ids[:20], ids[-20:]))
    assert np.array_equal(np.array(first["data"][0]["embedding"], np.float32), first_20)
    assert np.array_equal(np.array(first["data"][1]["embedding"], np.float32), rain)
    assert np.array_equal(np.array(last["data"][0]["embedding"], np.float32), last_20)
    assert score["data"][0]["score"] == pytest.approx(float(rain.astype(float) @ first_20), abs=1e-6)
    assert first["usage"]["prompt_tokens"] == 20 + len(ids_of("Rain."))


async def test_reranker(autojump_clock: trio.abc.Clock) -> None:
    """Of a reranker's prompt the end of the document is dropped, not the question that follows it."""
    fields: dict[str, Any] = {"query": "Knots?", "return_documents": False}
    async with small_runtime(**SCORE, max_model_len=3000, num_blocks=800) as client:
        whole = await post(client, "/rerank", documents=["A cord with a knot."], **fields)
        used = whole["usage"]["prompt_tokens"]
        cut = await post(client, "/rerank", documents=["A cord with a knot. " + LONG], **fields)
        short = await post(client, "/rerank", documents=[LONG], **fields, truncate_prompt_tokens=used)
        refused = await post(client, "/rerank", status=400, documents=[LONG], **fields, truncate_prompt_tokens=5)
    assert short["usage"]["prompt_tokens"] == used < cut["usage"]["prompt_tokens"]
    assert refused["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": "x"}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": 121}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": 5, "echo": True}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side"),
        (COMPLETIONS, {"truncate_prompt_tokens": -1, "max_tokens": 128}, "max_tokens"),
        ("/v1/responses", {"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
async def test_bad_fields(autojump_clock: trio.abc.Clock, path: str, fields: dict[str, Any], param: str) -> None:
    """What cannot be done is a 400 that names the field, and at most what leaves room for the output can be kept."""
    async with small_runtime(max_model_len=128) as client:
        asked = {"model": "demo", **fields} if path == "/v1/responses" else body([1, 2, 3], **fields)
        answer = await post(client, path, status=400, **asked)
        assert answer["error"]["param"] == param, answer
        assert (await post(client, COMPLETIONS, **body([1, 2, 3], truncate_prompt_tokens=120)))["usage"]


def test_everything_else_moves_along() -> None:
    """Breakpoints and the parts of messages are those of the tokens that are left."""
    marks = (Breakpoint(0, CacheTtl.ONE_HOUR), Breakpoint(3, CacheTtl.ONE_HOUR), Breakpoint(8, CacheTtl.ONE_HOUR))
    spans = (PartSpan(0, None, "user", 1, 4), PartSpan(1, None, "user", 4, 10))
    chat = EncodedPrompt(list(range(10)), marks, spans=spans)
    last, first = (shortened_chat(chat, Truncation(5, keeps_end)) for keeps_end in (True, False))
    assert (last.token_ids, first.token_ids) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4])
    assert [mark.position for mark in last.breakpoints] == [0, 0, 3]
    assert [mark.position for mark in first.breakpoints] == [0, 3, 5]
    assert [(span.message, span.start, span.end) for span in last.spans] == [(1, 0, 5)]
    assert [(span.message, span.start, span.end) for span in first.spans] == [(0, 1, 4), (1, 4, 5)]


def test_added_tokens_are_kept() -> None:
    """The tokens that a tokenizer puts around a text stay around what is left of it."""
    ids = [90, 1, 2, 3, 4, 91]

    class Backend:
        def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool) -> tuple[int, ...]:
            return {("", True): (90, 91), ("tail", False): (4,)}[text, add_special_tokens]

    encoder: Any = attrs.make_class("Encoder", ["backend"])(Backend())

    def short(num_tokens: int, *, keeps_end: bool, tail: str = "", special: bool = True) -> Any:
        wanted = Truncation(num_tokens, keeps_end)
        return shortened_text(encoder, ids, TextPrompt("text", tail), wanted, special=special)

    assert short(4, keeps_end=True) == [90, 3, 4, 91] and short(4, keeps_end=False) == [90, 1, 2, 91]
    assert short(4, keeps_end=False, tail="tail") == [90, 1, 4, 91]
    assert short(2, keeps_end=False, special=False) == [90, 1] and short(2, keeps_end=True, special=False) == [4, 91]
    assert short(9, keeps_end=True) == ids and short(1, keeps_end=False) == [91]
    assert short(2, keeps_end=False, tail="tail").param == "truncate_prompt_tokens"
    assert shortened_ids(ids, Truncation(2, True), head=3) == [90, 1]
