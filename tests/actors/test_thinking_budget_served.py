"""A thinking budget with a real model, across every actor: reasoning is closed where it must be, and only there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from unittest import mock

import attrs
import trio

from quipu.actors import wiring
from quipu.actors.detokenizer.output_format import ChosenFormat
from quipu.actors.engine.engine import LoopHost
from quipu.actors.messages.handler import Closed, ScoredDelta
from quipu.actors.messages.output import OutputFormat
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.fake import Dials
from tests.prompts import prompt_of
from tests.runtimes import Client, open_with_kept_vocabulary, runtime_config, serving_info, value_of
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

TAGS = ("<think>", "</think>")
VOCABULARY = Vocabulary(TINY)
OPENING, CLOSING = (list(VOCABULARY.encoder.encode_within_text(tag)) for tag in TAGS)
"""Several tokens each."""
OPENED = [*prompt_of(40, seed=5), *OPENING]
MAX_TOKENS = 16


@asynccontextmanager
async def open_client(tags: tuple[str, str] | None = TAGS, **changes: Any) -> AsyncIterator[Client]:
    config = runtime_config(**{"executor": "reference", **changes})
    info, host = serving_info(config), LoopHost(config.engine)
    chosen = ChosenFormat(None, OutputFormat(reasoning_tags=tags))
    async with AsyncExitStack() as stack:
        with mock.patch.object(wiring, "choose_format", return_value=chosen):
            opening = open_with_kept_vocabulary(config, info, lambda _: host, make_renderer=InlineRenderer)
            runtime = await stack.enter_async_context(opening)
        with trio.fail_after(100):
            while not runtime.desk.health().is_ready:
                await trio.sleep(0.01)
            yield Client(runtime, config, Dials())


async def ask(
    client: Client, *prompts: list[int], budget: int | None, rules: LogitRules | None = None, **fields: Any
) -> tuple[list[list[int]], UsageRecord]:
    """Return the tokens of each choice, and the record."""
    request = client.encode(*prompts, **{"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 3, **fields})
    sampling = attrs.evolve(request.sampling, logprobs=0, rules=rules)
    ticket = client.runtime.desk.open(attrs.evolve(request, sampling=sampling, thinking_budget=budget), "test")
    outputs: dict[int, list[int]] = {}
    try:
        await ticket.start()
        while True:
            for event in await ticket.mailbox.get():
                if isinstance(event, ScoredDelta):
                    outputs.setdefault(event.index, []).extend(score.token_id for score in event.scores)
                elif isinstance(event, Closed):
                    assert event.error is None
                    return [outputs[index] for index in sorted(outputs)], event.record
    finally:
        ticket.leave()


async def test_reasoning_is_closed_by_budget() -> None:
    """Reasoning that a prompt leaves open is closed after the budget in each choice; nothing is closed if the prompt
    only mentions the delimiter in a message.
    """
    async with open_client() as client:
        mentioned = [*OPENED, *VOCABULARY.encode("<|im_end|>\n")]
        plain, _ = await ask(client, OPENED, mentioned, budget=None, n=2)
        limited, record = await ask(client, OPENED, mentioned, budget=5, n=2)
        others = LogitRules(allowed_token_ids=(700, 701), bias={CLOSING[0]: -100.0}, min_tokens=MAX_TOKENS)
        (at_once,), _ = await ask(client, OPENED, budget=0, rules=others)
    end = 5 + len(CLOSING)
    for before, after in zip(plain[:2], limited[:2], strict=True):
        assert after[:5] == before[:5] and after[5:end] == CLOSING != before[5:end]
    assert limited[2:] == plain[2:]
    assert at_once[: len(CLOSING)] == CLOSING and {700, 701} >= {*at_once[len(CLOSING) :]}
    assert record.completion_tokens == 4 * MAX_TOKENS


async def test_reasoning_that_the_model_opens() -> None:
    """Reasoning that the model opens is closed, too, counted from the end of the opening delimiter; later nothing is
    forced."""
    prompt, (opening, closing) = prompt_of(40, seed=6), (1, 2)
    async with open_client(tags=("<|im_start|>", "<|im_end|>")) as client:
        only = LogitRules(allowed_token_ids=(opening,))
        (output,), record = await ask(client, prompt, budget=3, rules=only, max_tokens=9)
    assert output == [opening] * 4 + [closing] + [opening] * 4
    assert record.completion_tokens == 9


async def test_budget_without_tags_has_no_effect() -> None:
    """A server that does not know how its model ends reasoning serves the request as if it had no budget."""
    async with open_client(tags=None) as client:
        plain, _ = await ask(client, OPENED, budget=None, max_tokens=4)
        limited, _ = await ask(client, OPENED, budget=0, max_tokens=4)
    assert limited == plain


async def test_same_tokens_after_preemption() -> None:
    """Wherever requests are preempted, reasoning ends at the same token as without preemptions."""
    prompts = [[*prompt_of(33 + 5 * index, seed=index), *OPENING] for index in range(5)]
    found: list[dict[int, list[list[int]]]] = []
    for changes in ({}, {"num_blocks": 14, "max_model_len": 160, "watermark": 0.0}):
        outputs: dict[int, list[list[int]]] = {}

        async def one(client: Client, index: int, outputs: dict[int, list[list[int]]]) -> None:
            outputs[index], _ = await ask(client, prompts[index], budget=6 * index, max_tokens=36)

        async with open_client(**changes) as client:
            async with trio.open_nursery() as nursery:
                for index in range(len(prompts)):
                    nursery.start_soon(one, client, index, outputs)
            num_preemptions = value_of(client.runtime.metrics.num_preemptions)
        found.append(outputs)
    assert num_preemptions > 0, "the pool must be too small for all requests"
    assert found[0] == found[1]
    for index, (output,) in found[1].items():
        assert output[6 * index : 6 * index + len(CLOSING)] == CLOSING
