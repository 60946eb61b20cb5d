"""The unused space at the end of a segment is skipped, whatever its size."""

from __future__ import annotations

import pytest

from quipu.actors.ledger.segment_files import Position, scan


@pytest.mark.parametrize("num_zeros", [0, 1, 65_535, 65_536, 65_537, 3 * 65_536 + 7])
@pytest.mark.parametrize("used", [b"", b"broken\n", b"broken\0\0line\n" + bytes(70_000) + b"x"])
def test_trailing_zeros_are_unused(num_zeros: int, used: bytes) -> None:
    """Trailing zeros, however many, change nothing; zeros before other bytes belong to the damage."""
    start = Position(3, 100)
    assert scan(used + bytes(num_zeros), start) == scan(used, start)
    damaged = sum(damage.num_bytes for damage in scan(used + bytes(num_zeros), start).damages)
    assert damaged == len(used)
