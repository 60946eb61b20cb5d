"""Random grammars of every kind: each gets a verdict and masks within a bounded time."""

from __future__ import annotations

import pytest

from tests.drawn_grammars import DRAWERS, draw_and_follow

COUNT = 60
"""Enough for each outcome to be seen; `make test-long` draws 10,000."""


@pytest.mark.parametrize("kind", DRAWERS)
async def test_drawn_grammars(kind: str) -> None:
    """Every grammar is accepted, refused or ended for taking too long; every accepted one gets masks."""
    report = (await draw_and_follow([kind], COUNT, seed=1))[kind]
    assert report.verdicts.total() == (COUNT // 20 if kind == "late" else COUNT)
    assert set(report.verdicts) <= {"accepted", "refused", "ended"}
    assert report.num_masks >= report.verdicts["accepted"] > 0
    if kind == "late":
        assert report.num_ended == report.num_failed > 0
    elif kind == "lark":
        assert report.verdicts["ended"] > 0
