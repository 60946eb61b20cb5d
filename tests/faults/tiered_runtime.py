"""Helpers of the tests about tiers that outlive an engine: a prompt, and what is asked of a runtime with tiers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import trio
import trio.testing

from tests.prompts import prompt_of
from tests.runtimes import BLOCK, BLOCK_BYTES, Answer, Client

LONG = [*prompt_of(12 * BLOCK, seed=1), 300]
"""A prompt with twelve blocks that can be reused."""
SMALL = {"num_blocks": 24, "max_model_len": 20 * BLOCK, "watermark": 0.0}
"""A runtime with 23 usable blocks on the device."""
DISK_SIZE = (4 << 20) + 200 * BLOCK_BYTES
"""Of a disk from which nothing is evicted, however large blocks are."""


def by_tier(answer: Answer) -> dict[str, int]:
    """Return how many tokens of a prompt came from which tier, without those that none came from."""
    assert answer.record.cached_by_tier is not None
    return {tier: num for tier, num in answer.record.cached_by_tier.items() if num}


def kept_in(tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a small runtime with a tier that outlives it: `disk` or `remote`."""
    if tier == "disk":
        return {**SMALL, "kv_disk": str(folder / "kv"), "kv_disk_size": DISK_SIZE, **more}
    secret = folder / "secret"
    if not secret.exists():
        secret.write_bytes(os.urandom(32))
        secret.chmod(0o600)
    return {**SMALL, "kv_remote": f"file://{folder / 'bucket'}", "kv_remote_secret": str(secret), **more}


async def stored(client: Client) -> None:
    """Wait until everything that is to be stored is."""
    await trio.testing.wait_all_tasks_blocked()
    for engine in client.engines:
        tiers = engine.block_manager.tiers
        assert tiers is not None
        while tiers.stores.are_under_way:
            await trio.sleep(0.01)
