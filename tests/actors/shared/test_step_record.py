"""The record of the step under way, as the engine's host finds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from quipu.actors.shared.step_record import StepRecord


@pytest.fixture
def both() -> Iterator[tuple[StepRecord, StepRecord]]:
    """Yield both ends of one record for four sequences."""
    fileno = StepRecord.open_memory(4)
    with closing(StepRecord(fileno)) as ours, closing(StepRecord(fileno)) as theirs:
        os.close(fileno)
        yield ours, theirs


def test_steps(both: tuple[StepRecord, StepRecord]) -> None:
    """What one end writes the other reads; between two steps there is none."""
    ours, theirs = both
    assert theirs.read() is None
    for step in ([5], [2**62, 1, 2, 3], [9, 8]):
        ours.begin(step)
        assert theirs.read() == tuple(step)
        ours.end()
        assert theirs.read() is None


def test_half_written(both: tuple[StepRecord, StepRecord]) -> None:
    """A step that could not be recorded completely reads as none."""
    ours, theirs = both
    ours.begin([1, 2])
    with pytest.raises(ValueError, match="different"):
        ours.begin([1, 2, 3, 4, 5])
    assert theirs.read() is None


def test_survives_its_writer() -> None:
    """The record can be read after the process that wrote it has ended."""
    fileno = StepRecord.open_memory(4)
    pid = os.fork()
    if not pid:
        try:
            StepRecord(fileno).begin([3, 4])
        finally:
            os._exit(0)  # or the tests would go on in the child
    os.waitpid(pid, 0)
    with closing(StepRecord(fileno)) as record:
        os.close(fileno)
        assert record.read() == (3, 4)
