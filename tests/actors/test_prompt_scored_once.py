"""A prompt is scored once, whatever the number of choices; each choice gets the scores, and their number is bounded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import FakeBackend
from tests.fake_oracle import continuation, prompt_scores
from tests.runtimes import Client, small_runtime, text_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(50, seed=1)
AHEAD = {"long_prefill_token_threshold": 8}
"""Beside another request, the first choice computes its prompt in seven steps; the others, which find it cached, sample
their first token in the first of these."""
RUNTIMES: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 20}, AHEAD]
ASKED: list[dict[str, Any]] = [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2, "logprobs": 0}]


@asynccontextmanager
async def busy_runtime(**changes: Any) -> AsyncIterator[Client]:
    """Yield the client of a runtime that serves another request all the time."""
    async with small_runtime(**changes) as client, trio.open_nursery() as nursery:
        nursery.start_soon(partial(client.ask, prompt_of(20, seed=7), max_tokens=900))
        await trio.sleep(0.05)
        yield client
        nursery.cancel_scope.cancel()


async def settle_beside(client: Client, num_others: int = 1) -> None:
    """Wait until only the other requests are left."""
    with trio.fail_after(60):
        while (
            client.runtime.entry_store.num_open_accounts > num_others
            or client.runtime.desk.num_live_sequences > num_others
        ):
            await trio.sleep(0.01)
    await trio.testing.wait_all_tasks_blocked()
    store = client.runtime.text_store
    assert len(store.tracked) == num_others and not store.prompts


def count_scored(client: Client) -> list[int]:
    """Return a list that grows by one for each prompt position that the backend scores."""
    backend = client.engine.executor.backend
    assert isinstance(backend, FakeBackend)
    scored: list[int] = []
    step = backend.step

    def counting(batch: StepBatch) -> Drawn:
        if batch.scoring is not None:
            scored.extend(batch.scoring.prompt_tokens)
        return step(batch)

    backend.step = counting
    return scored


async def ask(client: Client, **fields: Any) -> dict[str, Any]:
    exchange, answer = await over_http(client).post(COMPLETIONS, body(PROMPT, **fields))
    assert exchange.status == 200, answer
    return dict(answer)


def without_index(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choice.items() if name != "index"}


@pytest.mark.parametrize("logprob_fields", ASKED, ids=["echo", "prompt"])
@pytest.mark.parametrize("runtime", RUNTIMES, ids=["whole", "chunks", "ahead"])
@pytest.mark.parametrize("is_warm", [False, True])
async def test_choices_share_the_scores_of_a_prompt(
    autojump_clock: trio.abc.Clock, logprob_fields: dict[str, Any], runtime: dict[str, Any], is_warm: bool
) -> None:
    """Four choices get the scores that a single one gets, and the prompt is scored once.

    `cached_tokens` stays 0, although the other choices read blocks: with a warm cache they are ahead of the first,
    which computes its prompt in chunks.
    """
    async with busy_runtime(**runtime) as client:
        if is_warm:
            await ask(client, max_tokens=1)
        alone = await ask(client, **logprob_fields)
        scored = count_scored(client)
        before = samples(client)
        answer = await ask(client, n=4, **logprob_fields)
        await settle_beside(client)
        after = samples(client)
    assert len(scored) == len(PROMPT) - 1
    for choice in answer["choices"]:
        assert without_index(choice) == without_index(alone["choices"][0])
    details = answer["usage"]["prompt_tokens_details"]
    assert (details["cached_tokens"], answer["usage"]["prompt_tokens"]) == (0, len(PROMPT))
    assert after["usage_disputed_total"] == before["usage_disputed_total"] == 0


@pytest.mark.parametrize("runtime", RUNTIMES, ids=["whole", "chunks", "ahead"])
async def test_stream_begins_with_its_prompt(autojump_clock: trio.abc.Clock, runtime: dict[str, Any]) -> None:
    """With echo, each choice begins with the prompt, even if its tokens are sampled before the prompt is scored."""
    expected = [None, *prompt_scores(PROMPT, 0).logprobs]
    async with busy_runtime(**runtime) as client:
        await ask(client, max_tokens=1)
        _, chunks = await over_http(client).stream(
            COMPLETIONS, body(PROMPT, n=3, echo=True, logprobs=0, max_tokens=4, **STREAMED)
        )
        await settle_beside(client)
    for index in range(3):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"] and c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text_of(PROMPT) + text_of(continuation(PROMPT, 4))
        logprobs = [one for choice in own for one in choice["logprobs"]["token_logprobs"]]
        assert logprobs[: len(PROMPT)] == expected and len(logprobs) == len(PROMPT) + 4
        assert own[0]["text"].startswith(text_of(PROMPT)[:1]) and own[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("logprob_fields", ASKED, ids=["echo", "prompt"])
async def test_nothing_is_kept_after_leaving(autojump_clock: trio.abc.Clock, logprob_fields: dict[str, Any]) -> None:
    """Scores, and choices that wait for them, are dropped with their request, whenever its client leaves."""
    for patience_s in (0.005, 0.015, 0.025, 0.045):
        async with busy_runtime(**AHEAD) as client:
            await ask(client, max_tokens=1)
            with trio.move_on_after(patience_s):
                await ask(client, n=4, **logprob_fields)
            await settle_beside(client)  # also checks for kept prompts


async def test_two_prompts_of_one_request(autojump_clock: trio.abc.Clock) -> None:
    """Each prompt is scored with its own first choice, even if the prompts are equal."""
    async with small_runtime() as client:
        scored = count_scored(client)
        prompts = [PROMPT, PROMPT, prompt_of(20, seed=2)]
        exchange, answer = await over_http(client).post(COMPLETIONS, body(prompts, n=2, prompt_logprobs=0))
        await settle(client)
    assert exchange.status == 200 and len(scored) == 49 + 49 + 19
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [50, 50, 50, 50, 20, 20]


@pytest.mark.parametrize(
    ("fields", "num_scores", "param"),
    [
        ({"prompt_logprobs": 3}, 50 * 4, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "n": 16}, 50 * 4, "prompt_logprobs"),
        ({"echo": True, "logprobs": 3}, 50 * 4, "logprobs"),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 50 * 6, "prompt_logprobs"),
    ],
)
async def test_limit_of_prompt_logprobs(
    autojump_clock: trio.abc.Clock, fields: dict[str, Any], num_scores: int, param: str
) -> None:
    """Positions times tokens per position may reach but not exceed the limit. Choices share, so they do not count."""
    for limit, status in ((num_scores, 200), (num_scores - 1, 400)):
        async with small_runtime(max_prompt_scores=limit) as client:
            exchange, answer = await over_http(client).post(COMPLETIONS, body(PROMPT, **fields))
            await settle(client)
        assert exchange.status == status, answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, "too_many_logprobs")
    assert str(num_scores) in answer["error"]["message"]


async def test_limit_of_output_logprobs(autojump_clock: trio.abc.Clock) -> None:
    """The outputs of all choices count; without logprobs nothing does."""
    async with small_runtime(max_output_scores=2 * 8 * 3 - 1) as client:
        refused, answer = await over_http(client).post(COMPLETIONS, body(PROMPT, n=2, logprobs=2))
        served, _ = await over_http(client).post(COMPLETIONS, body(PROMPT, n=2, max_tokens=100))
        await settle(client)
    assert (refused.status, answer["error"]["param"], answer["error"]["code"]) == (400, "logprobs", "too_many_logprobs")
    assert served.status == 200


async def test_deferred_tokens_are_counted(autojump_clock: trio.abc.Clock) -> None:
    """Tokens that wait for the prompt's scores count like any others, and so does a stop string in them."""
    stop = text_of(continuation(PROMPT, 4))[-2:]
    async with busy_runtime(**AHEAD) as client:
        await ask(client, max_tokens=1)
        alone = await ask(client, echo=True, logprobs=0, stop=stop, max_tokens=20)
        answer = await ask(client, n=3, echo=True, logprobs=0, stop=stop, max_tokens=20)
        await settle_beside(client)
    assert json.dumps(answer["choices"]).count('"finish_reason": "stop"') == 3
    assert answer["usage"]["completion_tokens"] == 3 * alone["usage"]["completion_tokens"]
