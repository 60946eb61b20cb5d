"""The ledger while threads or memory are short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.actors.ledger import database, loader
from quipu.actors.ledger.segment_writer import SegmentWriter
from tests.actors.ledger.open_ledgers import ids_in, opened, rows_in, write
from tests.actors.thread_shortage import Shortage
from tests.processes import PATIENCE_S


async def test_shortages_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger survives a short shortage of threads and memory, and every record is synced and loaded."""
    sync, load, failed = SegmentWriter._sync, database.load, set[str]()  # noqa: SLF001 (what runs in the thread)

    def once(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def fail_or_call(*args: Any, **options: Any) -> Any:
            if name in failed:
                return call(*args, **options)
            failed.add(name)
            raise MemoryError

        return fail_or_call

    monkeypatch.setattr(SegmentWriter, "_sync", once("sync", sync))
    monkeypatch.setattr(loader, "load", once("load", load))
    async with opened(tmp_path, fsync=True) as ledger:
        shortage = Shortage(monkeypatch, *[RuntimeError("can't start new thread"), MemoryError()] * 4)
        await write(ledger, "a", "b")
        with trio.fail_after(PATIENCE_S):
            while rows_in(tmp_path) < 2:
                await trio.sleep(0.005)
        assert not shortage.errors and failed == {"sync", "load"}
    assert sorted(ids_in(tmp_path)) == ["a", "b"]
