"""Many choices of one prompt, and completions without tokens, through every actor, over HTTP, with the fake backend."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.actors.tokenizer import context_length
from quipu.web.api.body_table import MAX_CHOICES
from tests.fake_oracle import continuation
from tests.runtimes import BLOCK, small_runtime, text_of
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(3 * BLOCK + 2, seed=1)


async def test_as_many_choices_as_openai_allows(autojump_clock: trio.abc.Clock) -> None:
    """Each of 128 choices has its text; the prompt is counted once, and the usage adds up."""
    async with small_runtime() as client:
        exchange, answer = await over_http(client).post(COMPLETIONS, body(PROMPT, n=MAX_CHOICES, max_tokens=2))
        await settle(client)
        counters = samples(client)
    assert exchange.status == 200 and MAX_CHOICES == 128
    assert [choice["index"] for choice in answer["choices"]] == [*range(128)]
    assert {choice["text"] for choice in answer["choices"]} == {text_of(continuation(PROMPT, 2))}
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) and answer["usage"]["completion_tokens"] == 256
    assert counters["generation_tokens_total"] == 256 and counters["usage_disputed_total"] == 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": [PROMPT, PROMPT], "n": 2}, "n"),
        (COMPLETIONS, {"prompt": [PROMPT] * 4}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "one two three " * 20}], "n": 100}, "n"),
    ],
)
async def test_copies_of_long_prompts_are_bounded(
    path: str, fields: dict[str, Any], param: str, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of all choices together have a limit, since the engine gets a copy for each; the error names the
    field to lower."""
    monkeypatch.setattr(context_length, "MAX_SUBMITTED_TOKENS", 4 * len(PROMPT) - 1)
    async with small_runtime() as client:
        exchange, answer = await over_http(client).post(path, {"model": "demo", "max_tokens": 2, **fields})
        fits, _ = await over_http(client).post(COMPLETIONS, body(PROMPT, n=3, max_tokens=2))
        await settle(client)
    assert exchange.status == 400 and fits.status == 200
    assert answer["error"]["param"] == param and str(4 * len(PROMPT) - 1) in answer["error"]["message"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_completion_of_no_tokens(n: int, stream: bool, autojump_clock: trio.abc.Clock) -> None:
    """With `max_tokens` 0 the prompt is computed, and may be reused; the choices are empty, and no token is counted."""
    usages = []
    async with small_runtime() as client:
        for _ in range(2):
            fields = body(PROMPT, n=n, max_tokens=0)
            if stream:
                _, chunks = await over_http(client).stream(COMPLETIONS, {**fields, **STREAMED})
                choices, usage = [chunk["choices"][0] for chunk in chunks[:-2]], chunks[-2]["usage"]
            else:
                _, answer = await over_http(client).post(COMPLETIONS, fields)
                choices, usage = answer["choices"], answer["usage"]
            assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("", "length")] * n
            usages.append(usage)
            await settle(client)
        counters = samples(client)
    for usage, cached in zip(usages, (0, 3 * BLOCK), strict=True):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 0)
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    assert counters["generation_tokens_total"] == 0 and counters["usage_disputed_total"] == 0
