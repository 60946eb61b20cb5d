"""What a wrong clock may make retention delete."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from quipu.actors.ledger.service import open_ledger
from tests.actors.ledger.ledgers import record_of
from tests.actors.ledger.open_ledgers import config_of, ids_in, loaded, opened, write

DAY_S = 86_400.0


@pytest.mark.parametrize("ahead_days", [0.5, 365.0])
async def test_clock_that_is_ahead_deletes_a_day_at_most(tmp_path: Path, ahead_days: float) -> None:
    """A clock that is a year ahead deletes what a day more would have, though records are written by it."""
    newest = record_of("x").closed_at + 100 * DAY_S
    async with opened(tmp_path) as ledger:
        await write(ledger, "old", closed_at=newest - 31 * DAY_S)
        for age_days in (29.4, 28, 10, 0):
            await write(ledger, f"{age_days} days", closed_at=newest - age_days * DAY_S)
    now = newest + ahead_days * DAY_S
    async with open_ledger(config_of(tmp_path, retention_days=30.0), unix_time=lambda: now) as ledger:
        await write(ledger, "future", closed_at=now)
        await loaded(ledger)
        with trio.fail_after(10):
            while "old" in ids_in(tmp_path):
                await trio.sleep(0.005)
    kept = {"28 days", "10 days", "0 days", "future"} | ({"29.4 days"} if ahead_days < 0.6 else set())
    assert set(ids_in(tmp_path)) == kept
