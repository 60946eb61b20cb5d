"""Trap: a block from a lower tier is believed to be what the index says, since its checksum is right.

The index is wrong (a slot was reused, a file was replaced), and the model reads another prompt's KV: a wrong answer,
and perhaps another tenant's text. Here a block is stored with a header of its own; what it says is compared, too.
"""

from __future__ import annotations

import trio

from quipu.actors.engine.mover.host_store import HostStore
from tests.runtimes import BLOCK, BLOCK_BYTES, assert_served, small_runtime
from tests.traps.lower_tier import TIER, host_stores_of, push_out
from tests.traps.wire import prompt_of, samples, settle

PROMPT = [*prompt_of(10 * BLOCK, seed=1), 300]


def turn_around(store: HostStore) -> None:
    """Put each block into the slot of another one."""
    size, slots = BLOCK_BYTES, [slot for slot, header in enumerate(store.headers) if header is not None]
    blocks = {slot: (bytes(store.bytes[slot * size : (slot + 1) * size]), store.headers[slot]) for slot in slots}
    for slot, other in zip(slots, [*slots[1:], slots[0]], strict=True):
        store.bytes[slot * size : (slot + 1) * size], store.headers[slot] = blocks[other]


async def test_blocks_in_the_wrong_slots(autojump_clock: trio.abc.Clock) -> None:
    """Whole blocks that have changed places, with their headers and checksums, are misses."""
    async with small_runtime(**TIER) as client:
        await client.ask(PROMPT)
        await push_out(client)
        for store in host_stores_of(client):
            turn_around(store)
        again = await client.ask(PROMPT)
        await settle(client)
        after = samples(client)
    assert_served(again, PROMPT, 8)
    assert again.record.cached_tokens == 0
    assert after['kv_tier_failed_load_blocks_total{reason="corrupt",tier="host"}'] >= 1
    assert after["usage_disputed_total"] == 0
