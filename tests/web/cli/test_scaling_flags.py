"""The flags for the number of engines: what they must agree on, and what follows from them."""

from __future__ import annotations

import pytest

from quipu.actors.shared.checkpoint import CheckpointError
from quipu.web.cli.cli import make_parser
from quipu.web.cli.settings import resolve_config
from tests.tiny import TINY


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        ([], (1, 1, 1)),
        (["--engines", "3"], (3, 3, 3)),
        (["--max-engines", "4"], (1, 1, 4)),
        (["--engines", "3", "--min-engines", "2"], (2, 3, 3)),
        (["--engines", "2", "--min-engines", "1", "--max-engines", "4"], (1, 2, 4)),
    ],
)
def test_limits(flags: list[str], limits: tuple[int, int, int]) -> None:
    """Minimum and maximum default to the number at start; if they are equal, the number does not change."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert (config.min_engines, config.num_engines, config.max_engines) == limits
    assert config.autoscales is (limits[0] < limits[2])
    assert [info.settings[name] for name in ("min_engines", "engines", "max_engines")] == list(limits)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-engines", "2", "--max-engines", "4"], "--engines 1 is less than --min-engines 2"),
        (["--engines", "5", "--max-engines", "4"], "--engines 5 is more than --max-engines 4"),
    ],
)
def test_number_outside_the_limits(flags: list[str], message: str) -> None:
    """A number at start outside the limits is refused, and the error names both flags."""
    with pytest.raises(CheckpointError, match=message):
        resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
