"""Helpers of the traps about tiers: a small cache with a host tier, and what can go wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio.testing

from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.messages.tiers import Tier
from quipu.actors.shared.block_keys import chain_keys
from quipu.actors.tokenizer.submission import root_key_of
from tests.runtimes import BLOCK, BLOCK_BYTES, Client, engines_apart
from tests.traps.wire import prompt_of

ASKED = {"return_cached_tokens_details": True}
TIER = {"num_blocks": 32, "max_model_len": 28 * BLOCK, "kv_host_memory": 200 * BLOCK_BYTES, "watermark": 0.0}
"""A runtime with 31 usable blocks on the device and 200 on the host."""


def host_stores_of(client: Client) -> list[HostStore]:
    """Return the host tier of each engine."""
    carriers = [engine.carrier for engine in client.engines]
    stores = [carrier.stores[Tier.HOST] for carrier in carriers if carrier is not None]
    return [store for store in stores if isinstance(store, HostStore)]


async def push_out(client: Client, seed: int = 50) -> None:
    """Send other prompts until every block that is now on the device has been evicted.

    A prompt whose answer has one token never gets to the engine for decoding.
    """
    for other in range(3):
        await client.ask(prompt_of(24 * BLOCK, seed=seed + other), max_tokens=1 + engines_apart.get())
        await trio.testing.wait_all_tasks_blocked()


def flip_bits(client: Client) -> None:
    """Flip a bit of every block that lies on the host."""
    for store in host_stores_of(client):
        for slot, header in enumerate(store.headers):
            if header is not None:
                store.bytes[slot * BLOCK_BYTES + slot % BLOCK_BYTES] ^= 1 << slot % 8


def flip_bit(client: Client, prompt: list[int], index: int) -> None:
    """Flip a bit of each copy of one block of a prompt on the host."""
    root = root_key_of(client.encode(prompt), client.config)
    key = chain_keys(root, prompt, BLOCK)[index]
    found = [
        (store, slot)
        for store in host_stores_of(client)
        for slot, header in enumerate(store.headers)
        if header is not None and header.key == key
    ]
    assert found
    for store, slot in found:
        store.bytes[slot * BLOCK_BYTES + index] ^= 4


def break_loads(client: Client) -> Callable[[], None]:
    """Let every load raise, on each engine. Returns a function that ends this."""
    backends: list[Any] = [engine.executor.backend for engine in client.engines]
    whole = [backend.write_blocks for backend in backends]

    def fail(blocks: Sequence[int], source: memoryview) -> None:
        raise OSError("the copy was interrupted")

    for backend in backends:
        backend.write_blocks = fail

    def mend() -> None:
        for backend, write_blocks in zip(backends, whole, strict=True):
            backend.write_blocks = write_blocks

    return mend


def tiers_of(**tokens: int) -> dict[str, int]:
    """Return cached tokens by tier, as clients are told."""
    return {"device": 0, "host": 0, "disk": 0, "remote": 0, "unattributed": 0, **tokens}
