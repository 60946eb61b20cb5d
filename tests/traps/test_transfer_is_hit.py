"""Trap: the decode side of a pair reports the prefix that was moved to it as cached, or adds it to the prefill side's.

Here only what the prefill side found in its own cache is a hit: 0 if it found nothing, which is told as 0, and unknown
if it does not count, whatever the decode side or a router says.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from quipu.actors.messages.accountant import Side
from quipu.actors.messages.counts import Estimate
from quipu.actors.messages.scheduler import Submit
from tests.journals import KeptJournal
from tests.pair_books import check_books
from tests.scripted_engine import (
    Admit,
    Compute,
    Leave,
    RouterEstimate,
    Script,
    ScriptedEntry,
    Token,
    scripted_pair,
    settle_scripted,
    tokens,
)
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples

PROMPT = prompt_of(70)
MESSAGE = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "one two three " * 30}]}
DETAILS = {"return_cached_tokens_details": True}


def pair(cached: int | None, guess: int | None = None) -> Script:
    """Script a pair whose prefill side has `cached` tokens of each prompt, or does not count, and a router's guess.

    All full blocks are moved.
    """

    def script(submit: Submit) -> Sequence[Sequence[ScriptedEntry]]:
        size = len(submit.prompt_token_ids)
        blocks = (size - 1) // 16 * 16
        if submit.ends_after_prefill:
            tiers = None if cached is None else {"device": cached}
            guessed: list[ScriptedEntry] = [] if guess is None else [RouterEstimate(guess)]
            return [[*guessed, Admit(cached or 0, tiers), Compute(cached or 0, size), Token(), Leave()]]
        assert submit.peer is not None
        moved = Admit(blocks, {"device": 0, "peer": blocks}, side=Side.DECODE, tier_spans={"peer": [0, blocks]})
        return [[moved, Compute(blocks, size + 1), Token()], *tokens(2)]

    return script


@pytest.mark.parametrize("guess", [None, 64])
@pytest.mark.parametrize("cached", [0, 16])
async def test_prefill_side_alone_is_told(autojump_clock: trio.abc.Clock, cached: int, guess: int | None) -> None:
    """Every API tells what the prefill side had cached, 0 as 0; so do counters, tiers and records."""
    journal = KeptJournal()
    async with scripted_pair(pair(cached, guess), journal=journal) as client:
        http = over_http(client)
        _, whole = await http.post(COMPLETIONS, body(PROMPT, **DETAILS))
        _, chunks = await http.stream(COMPLETIONS, body(PROMPT, **STREAMED))
        _, message = await http.post("/v1/messages", MESSAGE)
        await settle_scripted(client)
        check_books(client, journal.closed)
        after = samples(client)
    for usage in (whole["usage"], chunks[-2]["usage"]):
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (70, cached)
    by_tier = {"device": cached, "host": 0, "disk": 0, "remote": 0, "unattributed": 0}
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == by_tier
    usage = message["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (cached, 0)
    assert usage["input_tokens"] == (journal.closed[2].prompt_tokens or 0) - cached
    assert after["prefix_cache_hits_total"] == after["request_cached_tokens_sum"] == 3 * cached
    assert [record.decode_engine for record in journal.closed] == [1, 1, 1]
    assert after["moved_tokens_total"] == sum(record.moved_tokens for record in journal.closed) >= 3 * 64


@pytest.mark.parametrize("guess", [None, 64])
async def test_uncounted_prefill_side(autojump_clock: trio.abc.Clock, guess: int | None) -> None:
    """If the prefill side does not count, nothing else is told as its count: no transfer, and no router's guess."""
    journal = KeptJournal()
    async with scripted_pair(pair(None, guess), journal=journal) as client:
        _, answer = await over_http(client).post(COMPLETIONS, body(PROMPT, **DETAILS))
        await settle_scripted(client)
        after = samples(client)
    (record,) = journal.closed
    assert "cached_tokens" not in answer["usage"]["prompt_tokens_details"]
    assert record.cached_tokens is None and isinstance(record.cached, Estimate)
    assert record.cached_tokens_estimate == (guess or 0), "the router of several engines expects something of each"
    assert after["prefix_cache_hits_total"] == after["prefix_cache_queries_total"] == 0
    assert record.moved_tokens == after["moved_tokens_total"] == 64


async def test_choices_and_lists_are_not_doubled(autojump_clock: trio.abc.Clock) -> None:
    """Neither choices nor prompts of a list add what was moved to their hits."""
    journal = KeptJournal()
    async with scripted_pair(pair(16), journal=journal) as client:
        http = over_http(client)
        _, choices = await http.post(COMPLETIONS, body(PROMPT, n=3, temperature=1))
        _, prompts = await http.post(COMPLETIONS, body([PROMPT, prompt_of(70, seed=1)]))
        await settle_scripted(client)
        check_books(client, journal.closed)
    for answer, num_prompts in ((choices, 1), (prompts, 2)):
        usage = answer["usage"]
        assert usage["prompt_tokens"] == 70 * num_prompts
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16 * num_prompts
    assert [record.moved_tokens for record in journal.closed] == [3 * 64, 2 * 64]
