"""Blocks in a bucket that engines share: found by others, and what happens while the bucket fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from quipu.actors.engine.mover.remote_store import RemoteStore
from quipu.actors.messages.tiers import Tier
from tests.faults.tiered_runtime import LONG, by_tier, kept_in, stored
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Client, assert_served, small_runtime
from tests.traps.wire import samples, settle


def on_remote(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a runtime with 23 usable blocks on the device and a bucket."""
    return kept_in("remote", folder, **more)


def store_of(client: Client) -> RemoteStore:
    carrier = client.engine.carrier
    assert carrier is not None
    store = carrier.stores[Tier.REMOTE]
    assert isinstance(store, RemoteStore)
    return store


async def test_found_by_another_server(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """What one has computed another finds, and counts as cached in the remote tier; its own cache is reset alone."""
    async with small_runtime(**on_remote(tmp_path)) as client:
        first = await client.ask(LONG)
        await stored(client)
    async with small_runtime(**on_remote(tmp_path)) as client:
        again = await client.ask(LONG)
        client.runtime.desk.reset_prefix_cache()
        third = await client.ask(LONG)
        await settle(client)
        after = samples(client)
    for answer in (first, again, third):
        assert_served(answer, LONG, 8)
    assert by_tier(again) == by_tier(third) == {"remote": 12 * BLOCK}
    assert after['cached_tokens_total{tier="remote"}'] == 24 * BLOCK
    assert after["usage_disputed_total"] == 0


async def test_found_by_another_engine(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """What one engine has stored the server's other engine finds at once, though its listing has found nothing."""
    async with small_runtime(**on_remote(tmp_path, num_engines=2, routing="round-robin")) as client:
        first = await client.ask(LONG)
        await stored(client)
        await settle(client)
        other = await client.ask(LONG)
        await settle(client)
        after = samples(client)
    assert_served(other, LONG, 8)
    assert {first.record.engine, other.record.engine} == {0, 1}
    assert by_tier(other) == {"remote": 12 * BLOCK}
    assert after['cached_tokens_total{tier="remote"}'] == 12 * BLOCK
    assert after["usage_disputed_total"] == 0


async def test_deleted_objects(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """What one engine has stored and somebody has deleted is computed by the other, counted as missing, and stored
    anew; then either finds it."""
    async with small_runtime(**on_remote(tmp_path, num_engines=2, routing="round-robin")) as client:
        first = await client.ask(LONG)
        await stored(client)
        await settle(client)
        for path in (path for path in (tmp_path / "bucket").rglob("*") if path.is_file()):
            path.unlink()
        other = await client.ask(LONG)
        await stored(client)
        await settle(client)
        after = samples(client)
        client.runtime.desk.reset_prefix_cache()
        found = [await client.ask(LONG) for _ in range(4)]
        await settle(client)
        last = samples(client)
    for answer in (other, *found):
        assert_served(answer, LONG, 8)
    assert by_tier(other) == {}
    missing = 'kv_tier_failed_load_blocks_total{reason="missing",tier="remote"}'
    assert after[missing] == last[missing] == 1, "the load ends at the first"
    earliest = {answer.record.engine: by_tier(answer) for answer in reversed(found)}
    assert earliest == {engine: {"remote": 12 * BLOCK} for engine in (0, 1)}
    assert {first.record.engine, other.record.engine} == {0, 1}
    assert last["usage_disputed_total"] == 0


async def test_below_a_disk(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """An engine with an empty disk loads from the bucket, stores on its disk what it has loaded, and finds it there."""
    async with small_runtime(**on_remote(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
    disk = {"kv_disk": str(tmp_path / "kv"), "kv_disk_size": 4 << 20}
    async with small_runtime(**on_remote(tmp_path, **disk)) as client:
        from_bucket = await client.ask(LONG)
        await stored(client)
    async with small_runtime(**on_remote(tmp_path, **disk)) as client:
        from_disk = await client.ask(LONG)
        await settle(client)
    assert (by_tier(from_bucket), by_tier(from_disk)) == ({"remote": 12 * BLOCK}, {"disk": 12 * BLOCK})


async def test_changed_objects(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Objects that somebody has changed are noticed, counted as corrupt and computed; the text is the same."""
    async with small_runtime(**on_remote(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
    for path in (path for path in (tmp_path / "bucket").rglob("*") if path.is_file()):
        contents = bytearray(path.read_bytes())
        contents[len(contents) // 2] ^= 1
        path.write_bytes(contents)
    async with small_runtime(**on_remote(tmp_path)) as client:
        again = await client.ask(LONG)
        await settle(client)
        after = samples(client)
    assert_served(again, LONG, 8)
    assert by_tier(again) == {}
    assert after['kv_tier_corrupt_total{tier="remote"}'] >= 1


async def test_bucket_gone_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    """While the bucket is gone prompts are computed, and the tier stays on; once it is back they are found again."""
    async with small_runtime(**on_remote(tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
    bucket, away = tmp_path / "bucket", tmp_path / "away"
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(**on_remote(tmp_path)) as client:
            await client.ask(prompt_of(3 * BLOCK, seed=8), max_tokens=1)  # its listing is over
            await stored(client)
            bucket.rename(away)
            bucket.write_bytes(b"no folder")
            gone = await client.ask(LONG)
            bucket.unlink()
            away.rename(bucket)
            client.runtime.desk.reset_prefix_cache()
            monkeypatch.setattr(store_of(client), "_clock", lambda: time.monotonic() + 120)  # its pause is over
            back = await client.ask(LONG)
            client.runtime.desk.reset_prefix_cache()
            settled = await client.ask(LONG)
            await settle(client)
            after = samples(client)
    for answer in (gone, back, settled):
        assert_served(answer, LONG, 8)
    assert by_tier(gone) == {}
    assert by_tier(back).keys() == {"remote"}, "the first attempt after the pause"
    assert by_tier(settled) == {"remote": 12 * BLOCK}
    assert not [line for line in lines if line["event"] == "kv_tier.off"]
    assert after['kv_tier_failed_load_blocks_total{reason="failed",tier="remote"}'] >= 1
    assert after["usage_disputed_total"] == 0
