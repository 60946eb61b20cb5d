"""The guarantee under `kill -9`: no record of a complete response is lost, and none is duplicated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.ledger_kills import SMALL_SEGMENT, kill_concurrently


@pytest.mark.timeout(400)
def test_six_kills(tmp_path: Path) -> None:
    """Servers are killed at random moments, also during start-up: each complete response has one equal record."""
    flags = ["--executor", "fake", "--ledger-segment-bytes", str(SMALL_SEGMENT)]
    tallies = kill_concurrently(tmp_path, num_kills=6, num_lanes=2, seed=11, flags=flags)
    assert not [problem for tally in tallies for problem in tally.problems]
    assert sum(len(tally.seen) for tally in tallies) > 15, "clients must have received responses"
    assert sum(tally.num_open for tally in tallies) > 0, "kills must have interrupted requests"
