"""Trap: a block that another engine has told of, and that is not there, is asked for with every prompt.

Each such prompt waits for a request whose answer is known. Here it is asked for once; then it is computed at once, and
stored anew by whoever computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.actors.engine.mover.remote_store import RemoteStore
from quipu.actors.shared.block_keys import chain_keys
from quipu.actors.tokenizer.submission import root_key_of
from tests.faults.tiered_runtime import LONG, by_tier, kept_in
from tests.runtimes import BLOCK, Client, assert_served, small_runtime
from tests.traps.wire import samples, settle

MISSING = 'kv_tier_failed_load_blocks_total{reason="missing",tier="remote"}'


def tell_wrong(client: Client) -> None:
    """Have the router believe again that the whole prompt is in the object store."""
    keys = chain_keys(root_key_of(client.encode(LONG), client.config), LONG, BLOCK)
    store = client.runtime.route_store
    for engine in store.engines.values():
        store.routing.shared.add(engine.slot, keys)


async def test_wrong_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock) -> None:
    """However often the router is wrong about a prompt, no block is asked for twice, and every answer is right."""

    def refuse(*_: object) -> None:
        raise OSError("nothing is stored here")

    def count(store: RemoteStore, slots: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> Any:
        asked.extend(keys)
        return read(store, slots, keys, memory)

    asked: list[bytes] = []
    read = RemoteStore.read
    monkeypatch.setattr(RemoteStore, "write", refuse)
    monkeypatch.setattr(RemoteStore, "read", count)
    async with small_runtime(**kept_in("remote", tmp_path, num_engines=1)) as client:
        tell_wrong(client)
        for _ in range(4):
            client.runtime.desk.reset_prefix_cache()
            answer = await client.ask(LONG)
            await settle(client)
            assert_served(answer, LONG, 8)
            assert by_tier(answer) == {}
            tell_wrong(client)
        after = samples(client)
    assert len(asked) == len(set(asked)) == 12 and after[MISSING] == 1
    assert after["usage_disputed_total"] == 0
