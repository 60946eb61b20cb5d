"""Blocks that go to the host's memory and come back: what is told of them, and what happens when that goes wrong."""

from __future__ import annotations

import trio
import trio.testing

from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.shared.block_keys import chain_keys
from quipu.actors.tokenizer.submission import root_key_of
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Client, assert_served, small_runtime
from tests.traps.wire import samples, settle

BLOCK_BYTES = 8 * BLOCK
LONG = [*prompt_of(12 * BLOCK, seed=1), 300]
"""A prompt with twelve blocks that can be reused."""
TIER = {"num_blocks": 24, "max_model_len": 20 * BLOCK, "kv_host_memory": 100 * BLOCK_BYTES, "watermark": 0.0}
"""23 usable blocks on the device and 100 on the host."""


def slot_of(client: Client, index: int) -> int:
    """Return where the host keeps a block of `LONG`."""
    root = root_key_of(client.encode(LONG), client.config)
    key = chain_keys(root, LONG, BLOCK)[index]
    (slot,) = [at for at, header in enumerate(store_of(client).headers) if header is not None and header.key == key]
    return slot


def store_of(client: Client) -> HostStore:
    store = client.engine.host_store
    assert store is not None
    return store


async def push_out(client: Client, seed: int = 50) -> None:
    """Ask other prompts until nothing that is on the device now is there any more."""
    for other in range(3):
        await client.ask(prompt_of(14 * BLOCK, seed=seed + other), max_tokens=1)
        await trio.testing.wait_all_tasks_blocked()


async def test_found_on_the_host(autojump_clock: trio.abc.Clock) -> None:
    """A prompt whose blocks have been evicted is loaded, counts by tier, and has the same text."""
    async with small_runtime(**TIER) as client:
        first = await client.ask(LONG)
        await push_out(client)
        again = await client.ask(LONG)
        await settle(client)
        after = samples(client)
    for answer in (first, again):
        assert_served(answer, LONG, 8)
    assert first.record.cached_tokens == 0
    assert again.record.cached_tokens == 12 * BLOCK
    assert again.record.cached_by_tier == {"device": 0, "host": 12 * BLOCK, "disk": 0, "remote": 0, "unattributed": 0}
    assert after["usage_disputed_total"] == 0


async def test_flipped_bit(autojump_clock: trio.abc.Clock) -> None:
    """A block whose bytes have changed is noticed; it and what follows it are computed, and count so."""
    async with small_runtime(**TIER) as client:
        await client.ask(LONG)
        await push_out(client)
        store_of(client).bytes[slot_of(client, 4) * BLOCK_BYTES + 9] ^= 4
        again = await client.ask(LONG)
        await push_out(client, seed=60)
        third = await client.ask(LONG)
        await settle(client)
        after = samples(client)
    for answer in (again, third):
        assert_served(answer, LONG, 8)
    assert again.record.cached_by_tier is not None and again.record.cached_by_tier["host"] == 4 * BLOCK
    assert again.record.cached_tokens == 4 * BLOCK
    assert third.record.cached_tokens == 12 * BLOCK, "the wrong copy has not been replaced"
    assert after["usage_disputed_total"] == 0
