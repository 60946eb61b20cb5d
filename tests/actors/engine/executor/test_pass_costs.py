"""What passes cost: measured by their rows and by the KV that they read, in bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest

from quipu.actors.engine.executor.pass_costs import MAX_S, SIZES, measure_costs
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import FakeBackend
from tests.kernels.kernel_checkpoints import backend_config


class TimedBackend(FakeBackend):
    """Takes 20 ms, 1 ms a row, and per 1,000 positions 4 ms for the first that reads a block, 1 ms for others."""

    def __init__(self, num_blocks: int, *, slowness: float = 1.0, hiccups: int = 0) -> None:
        config = backend_config(Path("unused"), num_blocks=num_blocks, max_num_seqs=96, max_model_len=4096)
        super().__init__(config)
        self.now = 0.0
        self.sizes: list[int] = []
        self._slowness = slowness
        self._hiccups = hiccups

    def step(self, batch: StepBatch) -> Drawn:
        num_rows = len(batch.slots)
        self.sizes.append(num_rows)
        ms = 20.0 + num_rows
        seen: set[int] = set()
        for table, position in zip(batch.block_tables, batch.positions, strict=True):
            ms += position / 1000 * (1.0 if table[0] in seen else 4.0)
            seen.add(table[0])
        if len(self.sizes) <= self._hiccups:
            ms *= 3  # something else runs on this machine
        self.now += ms / 1000 * self._slowness
        return Drawn.of(batch, range(num_rows), [0] * num_rows)


def test_costs_are_those_of_passes() -> None:
    """The table holds what passes take, by rows, by what sequences read, and by what drafts read once more."""
    backend = TimedBackend(1 + 8 * 65)
    costs = measure_costs(backend, 96, 4096, clock=lambda: backend.now)
    assert costs.num_tokens == tuple(sorted(size for size in SIZES if size <= 96))
    assert costs.costs == pytest.approx([0.020 + 0.001 * size for size in costs.num_tokens])
    assert costs.of_position == pytest.approx(4e-6, rel=0.02)
    assert costs.of_draft_position == pytest.approx(1e-6, rel=0.1)


def test_disturbed_passes_do_not_count() -> None:
    """Passes that were slow because of something else are timed again."""
    backend = TimedBackend(1 + 8 * 65, hiccups=10)
    costs = measure_costs(backend, 96, 4096, clock=lambda: backend.now)
    assert costs.costs == pytest.approx([0.020 + 0.001 * size for size in costs.num_tokens])


def test_slow_models_are_measured_less() -> None:
    """The more a pass takes, the fewer sizes are timed; at least two are, and the largest is the second."""
    backend = TimedBackend(200, slowness=100)
    costs = measure_costs(backend, 40, 4096, clock=lambda: backend.now)
    assert costs.num_tokens == (1, 40)
    assert backend.now < 6 * MAX_S * 2
    backend = TimedBackend(200, slowness=10)
    costs = measure_costs(backend, 96, 4096, clock=lambda: backend.now)
    assert costs.num_tokens[0] == 1 and 3 < len(costs.num_tokens) < len(SIZES)


def test_little_memory() -> None:
    """With a block for each row at most, what reading KV costs is left out."""
    backend = TimedBackend(3)
    costs = measure_costs(backend, 4, 12, clock=lambda: backend.now)
    assert costs.num_tokens == (1, 2, 4) and costs.of_position == costs.of_draft_position == 0
