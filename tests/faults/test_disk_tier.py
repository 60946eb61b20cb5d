"""Blocks on a disk: found again after a restart, counted by tier, and what happens when the disk fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from quipu.actors.engine.mover.disk_store import DiskStore
from quipu.actors.messages.tiers import Tier
from tests.faults.tiered_runtime import LONG, SMALL, by_tier, stored
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, BLOCK_BYTES, Client, assert_served, kill_engine, small_runtime
from tests.traps.wire import samples, settle


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a runtime with 23 usable blocks on the device and a disk."""
    return {**SMALL, "kv_disk": str(folder / "kv"), "kv_disk_size": 4 << 20, **more}


def disk_of(client: Client) -> DiskStore:
    carrier = client.engine.carrier
    assert carrier is not None
    store = carrier.stores[Tier.DISK]
    assert isinstance(store, DiskStore)
    return store


async def test_found_after_a_restart(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """A prompt that an engine has computed is loaded by the next one, counts as cached on the disk, and gets the same
    text."""
    async with small_runtime(**on_disk(tmp_path)) as client:
        first = await client.ask(LONG)
        await stored(client)
    async with small_runtime(**on_disk(tmp_path)) as client:
        again = await client.ask(LONG)
        third = await client.ask(LONG)
        await settle(client)
        after = samples(client)
    for answer in (first, again, third):
        assert_served(answer, LONG, 8)
    assert (by_tier(first), by_tier(again), by_tier(third)) == (
        {},
        {"disk": 12 * BLOCK},
        {"device": 12 * BLOCK},
    )
    assert again.record.cache_write_tokens == 0, "loading is nobody's write"
    assert after["usage_disputed_total"] == 0
    assert after['cached_tokens_total{tier="disk"}'] == 12 * BLOCK


async def test_through_host_and_disk(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """With a host tier between them, blocks come from the fastest tier that has them."""
    async with small_runtime(**on_disk(tmp_path, kv_host_memory=1 << 16)) as client:
        await client.ask(LONG)
        for seed in (50, 51, 52):
            await client.ask(prompt_of(14 * BLOCK, seed=seed), max_tokens=1)
            await stored(client)
        again = await client.ask(LONG)
        await settle(client)
    assert_served(again, LONG, 8)
    assert by_tier(again) == {"host": 12 * BLOCK}


async def test_other_numerics_find_nothing(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Blocks of another block size are discarded when the disk is opened; the log says so."""
    async with small_runtime(**on_disk(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(**on_disk(tmp_path, num_blocks=96, block_size=BLOCK // 2)) as client:
            again = await client.ask(LONG)
            await settle(client)
    assert by_tier(again) == {}
    (opened,) = [line for line in lines if line["event"] == "kv_disk.opened"]
    assert opened["num_found"] == 0


async def test_damaged_files(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Blocks whose bytes have changed are noticed, counted as corrupt and computed; the text is the same."""
    async with small_runtime(**on_disk(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
    for path in (tmp_path / "kv").rglob("segment-*"):
        contents = bytearray(path.read_bytes())
        for at in range(4096 + 7, len(contents), 8192):
            contents[at] ^= 1
        path.write_bytes(contents)
    async with small_runtime(**on_disk(tmp_path)) as client:
        again = await client.ask(LONG)
        await settle(client)
        after = samples(client)
    assert_served(again, LONG, 8)
    assert again.record.cached_tokens == 0
    assert after['kv_tier_corrupt_total{tier="disk"}'] >= 1
    assert after["usage_disputed_total"] == 0


@pytest.mark.parametrize("call", ["write", "read"])
async def test_failing_disk(call: str, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """A disk that fails is turned off with one line in the log; requests go on without it, with the right counts."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with small_runtime(**on_disk(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(**on_disk(tmp_path)) as client:
            setattr(disk_of(client), call, fail)
            answers = [await client.ask(LONG)]
            await client.ask(prompt_of(14 * BLOCK, seed=50), max_tokens=1)
            await stored(client)
            answers.append(await client.ask(LONG))
            await settle(client)
            after = samples(client)
    for answer in answers:
        assert_served(answer, LONG, 8)
    assert by_tier(answers[0]) == ({"disk": 12 * BLOCK} if call == "write" else {})
    assert "disk" not in by_tier(answers[1])
    assert [line["tier"] for line in lines if line["event"] == "kv_tier.off"] == ["disk"]
    assert after["usage_disputed_total"] == 0
    assert after['kv_tier_blocks{state="used",tier="disk"}'] == 0


async def test_reset_empties_the_disk(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """What was stored before a reset is not found after it, nor by a later engine."""
    async with small_runtime(**on_disk(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
        client.runtime.desk.reset_prefix_cache()
        await client.ask(prompt_of(3 * BLOCK, seed=9), max_tokens=1)
        again = await client.ask(LONG)
        await stored(client)
        await settle(client)
    assert_served(again, LONG, 8)
    assert again.record.cached_tokens == 0
    async with small_runtime(**on_disk(tmp_path)) as client:
        assert by_tier(await client.ask(LONG)) == {"disk": 12 * BLOCK}, "it was stored again after the reset"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.EIO, "Input/output error")])
async def test_engine_dies_before_its_disk_is_cleared(
    tmp_path: Path, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A reset holds for the engine that takes the place of one that could not clear its disk."""
    clear, errors = DiskStore.clear, [error]

    def clear_later(store: DiskStore) -> None:
        if errors:
            raise errors.pop()
        clear(store)

    monkeypatch.setattr(DiskStore, "clear", clear_later)
    async with small_runtime(**on_disk(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
        client.runtime.desk.reset_prefix_cache()
        await trio.sleep(0.1)
        if isinstance(error, OSError):
            kill_engine(client)
        again = await client.ask(LONG)
        await settle(client)
    assert_served(again, LONG, 8)
    assert again.record.cached_tokens == 0 and again.record.incarnation == 2


async def test_engine_dies_and_finds_its_blocks(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """An engine that takes a dead one's place finds what that had stored."""
    async with small_runtime(**on_disk(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
        kill_engine(client)
        again = await client.ask(LONG)
        await settle(client)
    assert_served(again, LONG, 8)
    assert by_tier(again) == {"disk": 12 * BLOCK}


async def test_tenants_share_nothing(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """The same prompt of another tenant finds nothing on the disk."""
    async with small_runtime(**on_disk(tmp_path)) as client:
        await client.ask(LONG, domain="a")
        await stored(client)
    async with small_runtime(**on_disk(tmp_path)) as client:
        other = await client.ask(LONG, domain="b")
        own = await client.ask(LONG, domain="a")
    assert (by_tier(other), by_tier(own)) == ({}, {"disk": 12 * BLOCK})


async def test_quota_of_a_tenant(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """A tenant keeps no more on the disk than its quota, the blocks used last; another tenant keeps its own."""
    quota = 8 * BLOCK_BYTES
    async with small_runtime(**on_disk(tmp_path, kv_quota=quota)) as client:
        await client.ask(LONG, domain="a")
        await stored(client)
        await client.ask(prompt_of(4 * BLOCK, seed=4), domain="b", max_tokens=1)
        await stored(client)
        tiers = client.engine.block_manager.tiers
        assert tiers is not None
        tier = tiers.by_tier[Tier.DISK]
        assert tier.quota is not None
        assert (tier.quota.num_blocks("a"), tier.quota.num_blocks("b")) == (8, 4)
        assert tier.index.num_used == 12
