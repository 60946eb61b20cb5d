"""Retention under a wrong clock: how much may be deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from quipu.actors.ledger.service import open_ledger
from tests.actors.ledger.ledgers import record_of
from tests.actors.ledger.open_ledgers import config_of, ids_in, loaded, opened, write
from tests.processes import PATIENCE_S

DAY_S = 86_400.0


@pytest.mark.parametrize("ahead_days", [0.5, 365.0])
async def test_clock_that_is_ahead_deletes_a_day_at_most(tmp_path: Path, ahead_days: float) -> None:
    """A clock that is ahead, even by a year, deletes at most one more day of records, even if it stamps new ones."""
    newest = record_of("x").closed_at + 100 * DAY_S
    async with opened(tmp_path) as ledger:
        await write(ledger, "old", closed_at=newest - 31 * DAY_S)
        for age_days in (29.4, 28, 10, 0):
            await write(ledger, f"{age_days} days", closed_at=newest - age_days * DAY_S)
    now = newest + ahead_days * DAY_S
    async with open_ledger(config_of(tmp_path, retention_days=30.0), unix_time=lambda: now) as ledger:
        await write(ledger, "future", closed_at=now)
        await loaded(ledger)
        with trio.fail_after(PATIENCE_S):
            while "old" in ids_in(tmp_path):
                await trio.sleep(0.005)
    kept = {"28 days", "10 days", "0 days", "future"} | ({"29.4 days"} if ahead_days < 0.6 else set())
    assert set(ids_in(tmp_path)) == kept


async def test_restarts_under_a_wrong_clock(tmp_path: Path) -> None:
    """Each start under a clock that is a year ahead deletes one more day of records, even if it has stamped new ones.

    The number of records that are due is logged before they are deleted.
    """
    newest = record_of("x").closed_at + 100 * DAY_S
    async with opened(tmp_path) as ledger:
        for age_days in (31, 29.5, 28.5, 25, 0):
            await write(ledger, f"{age_days} days", closed_at=newest - age_days * DAY_S)
    for number, (ahead_days, gone) in enumerate([(0, "31 days"), (365, "29.5 days"), (365, "28.5 days")]):
        now = newest + ahead_days * DAY_S
        with capture_logs() as lines:
            async with open_ledger(config_of(tmp_path, retention_days=30.0), unix_time=lambda now=now: now) as ledger:
                await write(ledger, f"future {number}", closed_at=now)
                await loaded(ledger)
                with trio.fail_after(PATIENCE_S):
                    while not any(line["event"] == "ledger.retention" for line in lines):
                        await trio.sleep(0.005)
        assert gone not in ids_in(tmp_path)
        due, done = (line for line in lines if line["event"].startswith("ledger.retention"))
        assert (due["event"], due["num_records"], done["num_deleted"]) == ("ledger.retention_due", 1, 1)
    assert set(ids_in(tmp_path)) == {"25 days", "0 days", "future 0", "future 1", "future 2"}
