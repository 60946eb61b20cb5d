"""Servers with a disk are killed as a whole: a few of the kills of `python -m tests.chaos.server_kills`."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from quipu.actors.messages.tiers import Tier
from tests.chaos.server_kills import Tally, kill_repeatedly


@pytest.mark.timeout(300)
def test_killed_servers(tmp_path: Path) -> None:
    """Whenever a server is killed, the next one on the same disk answers with the same bits, finds prompts there, and
    disputes nothing."""
    tally = kill_repeatedly(tmp_path, num_kills=2, seed=3, num_prompts=8, most_answers=30)
    assert tally.is_right, attrs.asdict(tally)
    assert (tally.num_kills, tally.num_records > 8) == (2, True)
    assert tally.num_found > 0 and tally.num_corrupt == 0


def test_verdict() -> None:
    """A run is wrong if one answer was, if one record is disputed, or if nothing was ever found on the disk."""
    hits = {"disk": 16}
    right = Tally(num_answers=3)
    right.cached.update(hits)
    assert right.is_right
    assert not Tally().is_right
    assert not attrs.evolve(right, num_wrong=1).is_right
    assert not attrs.evolve(right, num_disputed=1).is_right
    assert right.cached[Tier.DISK] == 16
