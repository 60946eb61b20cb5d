"""KV events say with which adapter blocks were computed, so that no router takes them for the model's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import trio

from quipu.actors.config.engine_config import KvEventsConfig
from quipu.actors.kv_events import adapted_blocks
from quipu.actors.kv_events.adapted_blocks import AdaptedBlocks
from quipu.actors.kv_events.event_log import BlockStored, Event, EventLog
from quipu.actors.messages.tiers import Tier
from tests.actors.engine.adapter_folders import make_folder
from tests.processes import free_ports
from tests.runtimes import small_runtime
from tests.traps.wire import prompt_of

TOKENS = list(range(8))


def stored(log: EventLog) -> list[tuple[list[bytes], str | None, str | None]]:
    """Return hashes, adapter and medium of each stored event since the last call."""
    return [(e.block_hashes, e.lora_name, e.medium) for e in log.take() if isinstance(e, BlockStored)]


def test_chains_and_tiers() -> None:
    """A chain belongs to its root's adapter, on the device and in lower tiers; others, and runs of both, do not."""
    log = EventLog(2, has_lower_tiers=True)
    log.adapted.note_root(b"root-1", "digest")
    log.on_stored([b"a"], b"root-1", TOKENS, 0, 0)
    log.on_stored([b"b", b"c"], b"a", TOKENS, 2, 1)
    log.on_stored([b"x"], b"root-2", TOKENS, 0, 0)
    assert stored(log) == [([b"a", b"b", b"c"], "digest", "GPU"), ([b"x"], None, "GPU")]
    log.on_stored([b"b", b"x"], b"", [], 0, 0, tier=Tier.HOST)
    assert stored(log) == [([b"b"], "digest", "CPU"), ([b"x"], None, "CPU")]
    log.on_removed([b"a", b"b", b"c"])
    assert len(log.adapted) == 0
    log.on_stored([b"a"], b"root-1", TOKENS, 0, 0)
    assert stored(log) == [([b"a"], "digest", "GPU")]
    log.on_cleared()
    assert len(log.adapted) == 0


def test_roots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the latest roots are known, of those that sequences keep naming."""
    monkeypatch.setattr(adapted_blocks, "MAX_ROOTS", 2)
    blocks = AdaptedBlocks()
    for root in (b"1", b"2", b"1", b"3"):
        blocks.note_root(root, "digest")
    assert [blocks.add([b"k"], root, is_first=True) for root in (b"1", b"2", b"3")] == ["digest", None, "digest"]


async def test_engine_says_which_adapter(
    autojump_clock: trio.abc.Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a request with an adapter are published with its digest, prompt and output; others are not."""
    taken: list[Event] = []
    take = EventLog.take

    def watched(log: EventLog) -> list[Event]:
        events = take(log)
        taken.extend(events)
        return events

    monkeypatch.setattr(EventLog, "take", watched)
    (port,) = free_ports(1)
    async with small_runtime(max_loras=1, kv_events=KvEventsConfig(f"tcp://127.0.0.1:{port}")) as client:
        adapter = await client.runtime.desk.adapters.load("one", str(make_folder(tmp_path / "one")))
        for digest in ("", adapter.digest):
            await client.ask(prompt_of(50), adapter=digest, max_tokens=20)
    counts = Counter[str | None]()
    for event in taken:
        if isinstance(event, BlockStored):
            counts[event.lora_name] += len(event.block_hashes)
    assert counts == {None: 4, adapter.digest: 4}
