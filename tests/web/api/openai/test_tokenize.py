"""`/tokenize`, `/detokenize` and `/v1/chat/completions/render`: the tokens that requests with the same prompts have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.journals import KeptJournal
from tests.runtimes import small_runtime
from tests.tiny import TINY
from tests.traps.wire import over_http
from tests.vocabularies import Vocabulary
from tests.web.asgi_client import Client

LIBRARY = Vocabulary(TINY).library.tokenizer
TOKENIZE, DETOKENIZE, RENDER = "/tokenize", "/detokenize", "/v1/chat/completions/render"
MESSAGES = [{"role": "user", "content": "Which knots? 漢字 <|im_end|>"}]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Client, KeptJournal]]:
    """Serve; at the end, nothing is open or booked."""
    journal = KeptJournal()
    async with small_runtime(journal=journal) as runtime:
        yield over_http(runtime), journal
        assert runtime.runtime.desk.num_open_requests == 0
    assert not journal.closed and not journal.open


async def post(client: Client, path: str, **body: Any) -> tuple[int, Any]:
    async with client.open("POST", path, body) as exchange:
        status = await exchange.wait_started()
        return status, json.loads(await exchange.read())


async def test_texts() -> None:
    """A text's ids are the tokenizer's, with its names if asked for, however long the context is; ids decode to it."""
    async with serving() as (client, _):
        for text in ("A cord.", "", "漢字 \U0001f98a", "<|im_end|>", "Hello. " * 2000):
            status, answer = await post(client, TOKENIZE, prompt=text, return_token_strs=True)
            ids = LIBRARY.encode(text).ids
            assert (status, answer["tokens"], answer["count"]) == (200, ids, len(ids))
            assert answer["token_strs"] == [LIBRARY.id_to_token(token_id) for token_id in ids]
            assert answer["max_model_len"] == 1008
            assert await post(client, DETOKENIZE, model="demo", tokens=ids) == (200, {"prompt": text})
        assert (await post(client, TOKENIZE, prompt="A cord."))[1]["token_strs"] is None


async def test_chats() -> None:
    """A chat's ids are those that it has as a request; rendering shows the text that they are made of."""
    async with serving() as (client, journal):
        _, told = await post(client, TOKENIZE, messages=MESSAGES, model="demo")
        _, rendered = await post(client, RENDER, messages=MESSAGES, temperature=0.5, top_k=7, max_tokens=9, stream=True)
        assert rendered["token_ids"] == told["tokens"] == LIBRARY.encode(rendered["prompt"]).ids
        assert rendered["prompt"].startswith("<|im_start|>user\nWhich knots? 漢字")
        sampling = rendered["sampling_params"]
        assert (sampling["temperature"], sampling["top_k"], sampling["max_tokens"]) == (0.5, 7, 9)
        assert (rendered["model"], rendered["stream"]) == ("demo", True)
        _, open_ended = await post(client, TOKENIZE, messages=MESSAGES, add_generation_prompt=False)
        assert told["tokens"][: open_ended["count"]] == open_ended["tokens"] and open_ended["count"] < told["count"]
        status, answer = await post(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, told["count"])
        await trio.testing.wait_all_tasks_blocked()
        journal.closed.clear()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": 5}, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": MESSAGES}, "prompt"),
        (TOKENIZE, {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        (TOKENIZE, {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        (TOKENIZE, {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"prompt": "a", "model": "none"}, "model"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": "a"}, "tokens"),
        (DETOKENIZE, {"tokens": [1, "a"]}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens"),
        (DETOKENIZE, {"tokens": [2**40]}, "tokens"),
        (RENDER, {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        (RENDER, {"messages": MESSAGES, "n": 0}, "n"),
    ],
)
async def test_refused(path: str, body: dict[str, Any], param: str) -> None:
    """Each error names the field that is wrong."""
    async with serving() as (client, _):
        status, answer = await post(client, path, **body)
        assert status in (400, 404) and answer["error"]["param"] == param, answer


async def test_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text with more tokens than are shown is refused, and its error names that limit, not the context's."""
    monkeypatch.setattr("quipu.actors.text_workers.pooled_encoder.MAX_READ_TOKENS", 300)
    monkeypatch.setattr("quipu.web.api.openai.tokenize.MAX_TOKENS", 300)
    async with serving() as (client, _):
        assert (await post(client, TOKENIZE, prompt="a " * 290))[0] == 200
        status, answer = await post(client, TOKENIZE, prompt="a " * 400)
        assert status == 400 and "300 tokens" in answer["error"]["message"] and answer["error"]["param"] == "prompt"
        status, answer = await post(client, DETOKENIZE, tokens=[7] * 301)
        assert status == 400 and answer["error"]["param"] == "tokens"
