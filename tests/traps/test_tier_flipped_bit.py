"""Trap: a block from a lower tier is served although its bytes have changed since it was stored.

Then the model reads another prompt's KV, or KV that nobody computed, and the answer is wrong without any notice. Here
a block is stored with a header and a checksum; a copy that differs is a miss, counted as corrupt, and is not kept.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio

from tests.fake_oracle import continuation
from tests.runtimes import BLOCK, Client, small_runtime, text_of
from tests.traps.lower_tier import ASKED, TIER, flip_bits, host_stores_of, push_out, tiers_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = [*prompt_of(10 * BLOCK, seed=1), 300]
CORRUPT = 'kv_tier_failed_load_blocks_total{reason="corrupt",tier="host"}'


async def ask(client: Client, *, is_streamed: bool) -> tuple[dict[str, Any], str]:
    """Return usage and text of the prompt's answer."""
    http = over_http(client)
    if not is_streamed:
        _, answer = await http.post(COMPLETIONS, body(PROMPT, **ASKED))
        return answer["usage"], answer["choices"][0]["text"]
    _, chunks = await http.stream(COMPLETIONS, body(PROMPT, **ASKED, **STREAMED))
    return chunks[-2]["usage"], "".join(chunk["choices"][0]["text"] for chunk in chunks[:-2])


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_flipped_bits(is_streamed: bool, autojump_clock: trio.abc.Clock) -> None:
    """Nothing that has changed is read: the text is right, the tokens count as computed, and the fault is counted."""
    async with small_runtime(**TIER) as client:
        await client.ask(PROMPT)
        await push_out(client)
        flip_bits(client)
        usage, said = await ask(client, is_streamed=is_streamed)
        await settle(client)
        after = samples(client)
        await push_out(client, seed=60)
        again, said_again = await ask(client, is_streamed=is_streamed)
        await settle(client)
        at_rest = samples(client)
    assert said == said_again == text_of(continuation(PROMPT, 8))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens_by_tier"] == tiers_of()
    assert after[CORRUPT] >= 1 and after["prefix_cache_hits_total"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] > 0, "intact copies are made again"
    assert at_rest["usage_disputed_total"] == 0


@pytest.mark.parametrize("changed", ["numerics", "num_tokens", "key"])
async def test_header_of_another_block(changed: str, autojump_clock: trio.abc.Clock) -> None:
    """A block with intact bytes, but another key, length or numerics, is not read either."""
    async with small_runtime(**TIER) as client:
        await client.ask(PROMPT)
        await push_out(client)
        other = {"numerics": "other", "num_tokens": BLOCK - 1, "key": bytes(32)}[changed]
        for store in host_stores_of(client):
            store.headers[:] = [header and attrs.evolve(header, **{changed: other}) for header in store.headers]
        usage, said = await ask(client, is_streamed=False)
        await settle(client)
        after = samples(client)
    assert said == text_of(continuation(PROMPT, 8))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert after[CORRUPT] >= 1 and after["usage_disputed_total"] == 0
