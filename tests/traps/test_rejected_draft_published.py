"""Trap: a draft token that was not accepted is hashed, found by others, or billed.

Other servers count drafts as completion tokens, or leave the KV of a rejected token in a block that is found later.
Here the executor books rejected positions apart: they are in no block that is found, and in no number that is billed.
"""

from __future__ import annotations

import trio

from quipu.kernels.fake import NONSENSE
from tests.fake_oracle import continuation
from tests.runtimes import BLOCK, Answer, full_blocks, small_runtime, text_of
from tests.traps.wire import prompt_of, samples, settle

NUM_TOKENS = 60


def numbers(answer: Answer) -> tuple[int, int, int, int]:
    record = answer.record
    assert not record.disputed
    return (record.prompt_tokens or 0, record.cached_tokens or 0, record.computed_tokens, record.completion_tokens)


async def test_nothing_of_it_is_found_or_billed(autojump_clock: trio.abc.Clock) -> None:
    """A prompt that goes on where a draft was right finds its blocks, one that goes on with the draft's wrong tokens
    does not, and every number but those of drafts is what it is without drafts."""
    prompt = prompt_of(40)
    async with small_runtime(fake_most_tokens=4, num_engines=1) as client:
        answer = await client.ask(prompt, max_tokens=NUM_TOKENS)
        await settle(client)
        outputs = continuation(prompt, NUM_TOKENS)
        assert answer.texts[0] == text_of(outputs)
        assert numbers(answer) == (40, 0, 40, NUM_TOKENS)
        record = answer.record
        assert record.draft_tokens > record.accepted_draft_tokens > 0, "some must be right, and some wrong"
        after = samples(client)
        assert after["generation_tokens_total"] == NUM_TOKENS
        assert after["spec_decode_num_draft_tokens_total"] == record.draft_tokens
        assert after["spec_decode_num_accepted_tokens_total"] == record.accepted_draft_tokens
        pool = client.engine.block_manager.pool
        assert pool.num_cached == (40 + NUM_TOKENS - 1) // BLOCK, "only blocks of what was kept may be found"
        for at in range(0, NUM_TOKENS - 1, 7):
            wrong = [*prompt, *outputs[:at], NONSENSE - 1, *outputs[at:]]
            found = await client.ask(wrong, max_tokens=1)
            assert numbers(found)[1] == (40 + at) // BLOCK * BLOCK
        again = [*prompt, *outputs]
        found = await client.ask(again, max_tokens=1)
        assert numbers(found) == (len(again), full_blocks(len(again)), len(again) - full_blocks(len(again)), 1)


async def test_numbers_are_those_without(autojump_clock: trio.abc.Clock) -> None:
    """Two choices, a second turn and a preempted neighbour: the same numbers with drafts as without."""
    told = []
    for most in (1, 4):
        async with small_runtime(fake_most_tokens=most, num_engines=1) as client:
            first = await client.ask(prompt_of(50, 1), n=2, max_tokens=20, temperature=1.0, seed=5)
            second = await client.ask([*prompt_of(50, 1), *prompt_of(30, 2)], max_tokens=33)
            await settle(client)
            told.append([numbers(first), numbers(second), first.texts, second.texts])
            assert (first.record.draft_tokens > 0) == (most > 1)
    assert told[0] == told[1]
