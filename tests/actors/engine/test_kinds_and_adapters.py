"""The kind and the adapter of a sequence, from its request to the batch and into the keys of its blocks."""

from __future__ import annotations

from unittest import mock

import pytest
import trio

from quipu.actors.messages.scheduler import SequenceKind
from quipu.kernels.batch import Drawn, Pooling, StepBatch
from tests.fake_oracle import continuation
from tests.runtimes import Client, small_runtime, text_of

PROMPT = list(range(100, 150))


def watch(client: Client) -> list[StepBatch]:
    """Return a list to which each batch of the engine is added."""
    batches: list[StepBatch] = []
    backend = client.engine.executor.backend
    step = backend.step

    def watched(batch: StepBatch) -> Drawn:
        batches.append(batch)
        return step(batch)

    mock.patch.object(backend, "step", watched).start()
    return batches


@pytest.mark.parametrize("most_tokens", [1, 4])
async def test_adapters_share_no_blocks(autojump_clock: trio.abc.Clock, most_tokens: int) -> None:
    """The same prompt under two adapters and under none is computed three times, each with its own weights; when asked
    again, each finds only its own blocks."""
    async with small_runtime(fake_most_tokens=most_tokens) as client:
        answers = [await client.ask(PROMPT, adapter=adapter) for adapter in ("", "one", "two") * 2]
    expected = [text_of(continuation(PROMPT, 8, adapter=adapter)) for adapter in ("", "one", "two")]
    assert [answer.texts[0] for answer in answers] == expected * 2
    assert len(set(expected)) == 3
    assert [answer.record.cached_tokens for answer in answers] == [0, 0, 0, 48, 48, 48]
    assert not any(answer.record.disputed for answer in answers)


async def test_batches_say_what_is_special(autojump_clock: trio.abc.Clock) -> None:
    """Batches have adapters while any open sequence has one, and pooling where a row's vector is wanted; otherwise both
    are None."""
    async with small_runtime() as client:
        batches = watch(client)
        await client.ask(PROMPT)
        assert batches and all(batch.pooling is None and batch.adapters is None for batch in batches)
        batches.clear()
        await client.ask(PROMPT, adapter="one")
        assert [(batch.pooling, batch.adapters) for batch in batches] == [(None, ["one"])] * len(batches)


async def test_embedding_draws_nothing(autojump_clock: trio.abc.Clock) -> None:
    """A sequence that is computed for an embedding ends with its prompt; its blocks are cached like any other's."""
    async with small_runtime() as client:
        batches = watch(client)
        answer = await client.ask(PROMPT, kind=SequenceKind.EMBED)
        assert [batch.samples for batch in batches] == [[False]]
        assert [batch.pooling for batch in batches] == [Pooling([0], [len(PROMPT) - 1])]
        after = await client.ask(PROMPT)
    assert answer.record.completion_tokens == 0 and answer.record.computed_tokens == len(PROMPT)
    assert after.record.cached_tokens == 48
