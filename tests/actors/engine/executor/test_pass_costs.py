"""What passes cost: measured by their rows and by the KV that they read, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import attrs
import pytest

from quipu.actors.engine.executor.draft_depth import PassCosts, StepSize, choose_depths
from quipu.actors.engine.executor.pass_costs import FEWEST_TURNS, MAX_S, SIZES, measure_costs
from quipu.kernels.backend import Capabilities
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import FakeBackend
from tests.kernels.kernel_checkpoints import backend_config

Slowdown = Callable[[float, float], float]
"""Takes the time, and what share of it a pass spends waiting for memory; returns by how much something else on the
machine slows it down."""


class TimedBackend(FakeBackend):
    """Waits 20 ms for memory, or computes 1.25 ms a row; in addition, per 1,000 positions, 4 ms for the first row that
    reads a block, 1 ms for others."""

    def __init__(self, num_blocks: int, *, slowness: float = 1.0, slowdown: Slowdown = lambda now, share: 1.0) -> None:
        config = backend_config(Path("unused"), num_blocks=num_blocks, max_num_seqs=96, max_model_len=4096)
        super().__init__(config)
        self.now = 0.0
        self.sizes: list[int] = []
        self._slowness = slowness
        self._slowdown = slowdown

    def step(self, batch: StepBatch) -> Drawn:
        num_rows = len(batch.slots)
        self.sizes.append(num_rows)
        ms = cost_of(num_rows)
        seen: set[int] = set()
        for table, position in zip(batch.block_tables, batch.positions, strict=True):
            ms += position / 1000 * (1.0 if table[0] in seen else 4.0)
            seen.add(table[0])
        for _ in range(20):
            self.now += ms / 1000 / 20 * self._slowness * self._slowdown(self.now, min(1.0, 20.0 / ms))
        return Drawn.of(batch, range(num_rows), [0] * num_rows)


def cost_of(num_rows: int) -> float:
    """Return the milliseconds of a pass whose rows read no KV."""
    return max(20.0, 1.25 * num_rows)


def measured(backend: TimedBackend, most_rows: int, max_model_len: int = 4096) -> PassCosts:
    return measure_costs(backend, most_rows, max_model_len, clock=lambda: backend.now)


def test_costs_are_those_of_passes() -> None:
    """The table holds what passes take, by rows, by what sequences read, and by what drafts read once more."""
    backend = TimedBackend(1 + 8 * 65)
    costs = measured(backend, 96)
    assert costs.num_tokens == tuple(sorted(size for size in SIZES if size <= 96))
    assert costs.costs == pytest.approx([cost_of(size) / 1000 for size in costs.num_tokens])
    assert costs.of_position == pytest.approx(4e-6, rel=0.02)
    assert costs.of_draft_position == pytest.approx(1e-6, rel=0.1)
    assert len(backend.sizes) == 1 + FEWEST_TURNS * (len(costs.num_tokens) + 2), "if nothing else runs, it is soon over"


def chances(first: float, following: float) -> list[float]:
    """Return how likely each token of a draft is right."""
    return [first * following**depth for depth in range(16)]


DRAFTS = (chances(0.9, 0.95), chances(0.7, 0.85), chances(0.45, 0.7), chances(0.3, 0.5))


def rates(costs: PassCosts, true: PassCosts) -> list[float]:
    """Return how many tokens a millisecond 1, 8 and 32 streams have with each kind of drafts, at true costs, if these
    costs say how many are verified."""
    found = []
    for num in (1, 8, 32):
        for draft in DRAFTS:
            depths = choose_depths([draft] * num, [0] * num, 64, StepSize(num, num, 0), costs).of_rows
            num_tokens = num + sum(sum(draft[:depth]) for depth in depths)
            found.append(num_tokens / true.of_pass(num + sum(depths)))
    return found


def busy_for(busy_s: float, period_s: float, seed: int) -> Slowdown:
    """Return the slowdown by something that computes in turns, and takes from passes what they read memory with."""
    start = Random(seed).random() * period_s
    return lambda now, share: 1.15 + 0.75 * share if (now + start) % period_s < busy_s else 1.0


@pytest.mark.parametrize(
    ("slowness", "busy_s", "period_s"),
    [(0.1, 0.05, 0.11), (1, 0.05, 0.11), (1, 0.3, 0.7), (5, 0.3, 0.7), (5, 0.9, 1.7), (5, 2.0, 4.0)],
)
def test_busy_machine(slowness: float, busy_s: float, period_s: float) -> None:
    """If the machine is busy half of the time, about as many drafts are verified as if it were not."""
    true = PassCosts.of({size: cost_of(size) for size in range(1, 97)})
    best = rates(true, true)
    for seed in range(12):
        backend = TimedBackend(1 + 8 * 65, slowness=slowness, slowdown=busy_for(busy_s, period_s, seed))
        costs = attrs.evolve(measured(backend, 96), of_position=0.0, of_draft_position=0.0)
        assert min(rate / other for rate, other in zip(rates(costs, true), best, strict=True)) > 0.9


def test_slow_models_are_measured_less() -> None:
    """The more a pass takes, the fewer sizes are timed; at least two are, and the largest is the second."""
    backend = TimedBackend(200, slowness=100)
    costs = measured(backend, 40)
    assert costs.num_tokens == (1, 40)
    assert backend.now < 6 * MAX_S * 2
    backend = TimedBackend(200, slowness=10)
    costs = measured(backend, 96)
    assert costs.num_tokens[0] == 1 and 3 < len(costs.num_tokens) < len(SIZES)


def test_little_memory() -> None:
    """With a block for each row at most, what reading KV costs is left out."""
    backend = TimedBackend(3)
    costs = measured(backend, 4, 12)
    assert costs.num_tokens == (1, 2, 4) and costs.of_position == costs.of_draft_position == 0


def test_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that 64 threads compute are timed as often as those of one, though they take the processors' time."""

    class OfMany(TimedBackend):
        @property
        def capabilities(self) -> Capabilities:
            return attrs.evolve(super().capabilities, num_threads=64)

    backend = OfMany(1 + 8 * 65)
    monkeypatch.setattr(time, "process_time", lambda: 64 * backend.now)
    assert measure_costs(backend, 96, 4096).costs == measured(TimedBackend(1 + 8 * 65), 96).costs
