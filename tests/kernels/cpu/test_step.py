"""`CpuBackend.step`: sampling rows, carried tokens, failed passes, bounds, and releasing the GIL."""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch

from quipu.kernels.batch import Drawn, Scoring
from quipu.kernels.checkpoints.dummy import DummySource
from quipu.kernels.checkpoints.weights import PieceByPiece
from quipu.kernels.cpu import program
from quipu.kernels.cpu.packing import PackedWeights
from quipu.kernels.cpu.program import Bounds, Op
from quipu.kernels.cpu.recorder import Recorder
from quipu.kernels.cpu.recording import record
from quipu.kernels.models.families import Model
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.family_configs import VOCAB_SIZE
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.reference.test_step import generate, row
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

pytestmark = needs_kernels

BOUNDS = Bounds(num_tokens=4, num_logits=4, num_blocks=160, num_positions=1024, vocab_size=32)


@pytest.fixture
def no_switching() -> Iterator[None]:
    """Make the interpreter switch threads only when one releases the GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def test_only_rows_that_sample_draw(checkpoints: dict[str, Path]) -> None:
    """Return the sampling rows in ascending order; return nothing for a pass without any."""
    backend = make_cpu_backend(checkpoints["llama"])
    drawn = backend.step(make_batch(row(0, samples=False), row(1), row(2, samples=False), row(3)))
    assert drawn.rows == [1, 3]
    assert all(0 <= token_id < VOCAB_SIZE for token_id in drawn.token_ids)
    assert backend.step(make_batch(row(0, samples=False))) == Drawn(rows=[], token_ids=[])


def test_same_tokens_as_the_reference(checkpoints: dict[str, Path]) -> None:
    """Sample the reference's tokens in float32, carried on the device or fed by the host, alone or in a batch."""
    backend = make_cpu_backend(checkpoints["llama"])
    together = generate(cast(Any, backend), [0, 1, 2, 3], carried=True)
    assert together == generate(make_backend(checkpoints["llama"]), [0, 1, 2, 3], carried=True)
    assert generate(cast(Any, backend), [3, 1], carried=False) == {index: together[index] for index in (3, 1)}
    assert generate(cast(Any, backend), [2], carried=True) == {2: together[2]}


def test_slot_without_drawn_token_cannot_carry(checkpoints: dict[str, Path]) -> None:
    """Raise an error that names the slot instead of feeding token 0 to the model."""
    backend = make_cpu_backend(checkpoints["llama"])
    with pytest.raises(ValueError, match="slot 5"):
        backend.step(make_batch(row(0, slot=5, token_ids=[0], carried=True, position=10)))


def test_row_with_nan_logits_affects_no_other(checkpoints: dict[str, Path]) -> None:
    """Report a row that reads unwritten KV and has NaN logits; draw, score and carry the others as ever."""
    backend = make_cpu_backend(checkpoints["llama"])
    first = backend.step(make_batch(row(0))).token_ids[0]
    carry = row(0, token_ids=[0], carried=True, position=10, output_position=1)
    batch = attrs.evolve(make_batch(row(1, position=5), carry), scoring=Scoring([0, 1], [2, 2], [], [], []))
    drawn = backend.step(batch)
    assert drawn.broken_rows == [0]
    alone = make_cpu_backend(checkpoints["llama"])
    alone.step(make_batch(row(0)))
    fed = row(0, token_ids=[first], position=10, output_position=1)
    expected = alone.step(attrs.evolve(make_batch(fed), scoring=Scoring([0], [2], [], [], [])))
    assert (drawn.token_ids[1], drawn.scores) == (expected.token_ids[0], expected.scores)
    again = row(0, token_ids=[0], carried=True, position=11, output_position=2)
    assert backend.step(make_batch(again)) == alone.step(make_batch(again))


def test_step_releases_the_gil(checkpoints: dict[str, Path], no_switching: None) -> None:
    """Release the GIL: a thread that waits for it runs during a call, or else after all of them."""
    backend = make_cpu_backend(checkpoints["llama"])
    batch = make_batch({"token_ids": prompt(1000, seed=1), "position": 0, "blocks": scattered_blocks(63, seed=1)})
    begun, ran = threading.Event(), threading.Event()

    def bystander() -> None:
        begun.wait()
        ran.set()

    one_pass = backend._pass(batch)
    thread = threading.Thread(target=bystander)
    thread.start()
    begun.set()
    calls = 0
    while not ran.is_set() and calls < 100:
        backend._run(one_pass, [])
        calls += 1
    has_run = ran.is_set()
    thread.join()
    assert has_run


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": [VOCAB_SIZE]}, "token id"),
        ({"token_ids": [-1]}, "token id"),
        ({"position": 1024, "blocks": [1] * 65}, "position"),
        ({"blocks": [160]}, "block 160"),
        ({"position": 16, "blocks": [1]}, "row 0 ends before"),
        ({"token_ids": [1] * 1025, "blocks": [1] * 65}, "1025 tokens"),
    ],
)
def test_out_of_bounds_batch_is_refused(checkpoints: dict[str, Path], changes: dict[str, Any], named: str) -> None:
    """Refuse a batch that would access memory outside of the model or the cache, before anything runs."""
    backend = make_cpu_backend(checkpoints["llama"])
    good = {"token_ids": [1], "position": 0, "blocks": [1]}
    with pytest.raises(ValueError, match=named):
        backend.step(make_batch({**good, **changes}))
    with pytest.raises(ValueError, match="logits index"):
        backend.logits(make_batch(good), [1])
    backend.step(make_batch(good))


class _BypassingModel:
    """A model that computes something with torch between two operations."""

    def __init__(self, inner: Any, bypass: Any) -> None:
        self._inner, self._bypass = inner, bypass

    def forward(self, token_ids_N: torch.Tensor, ops: Any) -> torch.Tensor:
        return cast(torch.Tensor, self._bypass(self._inner.forward(token_ids_N, ops)))

    def logits(self, x_ND: torch.Tensor, ops: Any) -> torch.Tensor:
        return cast(torch.Tensor, self._inner.logits(x_ND, ops))


class _Tiny:
    """A model of one matrix, used as embedding and as head."""

    def __init__(self, weights: PackedWeights) -> None:
        self.table_VD = weights.tensor("table", (32, 16))

    def forward(self, token_ids_N: torch.Tensor, ops: Recorder) -> torch.Tensor:
        return ops.embed(token_ids_N, self.table_VD)

    def logits(self, x_ND: torch.Tensor, ops: Recorder) -> torch.Tensor:
        return ops.linear(x_ND, self.table_VD)


@pytest.mark.parametrize("bypass", [lambda x: x * 2, lambda x: x[:, ::2], lambda x: x.t()])
def test_model_that_bypasses_ops_is_refused(checkpoints: dict[str, Path], bypass: Any) -> None:
    """Refuse a model that computes with torch between two operations, which the program would lack."""
    backend = make_cpu_backend(checkpoints["llama"])
    weights = PackedWeights(PieceByPiece(DummySource(torch.float32), torch.float32), backend._library)
    tiny = _Tiny(weights)
    record(cast(Model, tiny), weights, backend.cache, BOUNDS)
    with pytest.raises(ValueError, match="outside of Ops"):
        bypassing = cast(Model, _BypassingModel(tiny, bypass))
        record(bypassing, weights, backend.cache, BOUNDS)


def test_sums_replace_what_they_add(checkpoints: dict[str, Path]) -> None:
    """Products that add the residual stream store it in place, but not where it is read again."""
    found = make_cpu_backend(checkpoints["llama"])._program
    sums = [op for op in found.trunk if op.kind == program.LINEAR and op.z]
    assert len(sums) == 4 and all(op.y == op.z != op.x for op in sums[:2])
    gathered = [op.x for op in found.draw if op.kind == program.GATHER]
    assert sums[1].y in gathered, "the last layer adds to the residual stream of the rows that draw"


def test_operations_without_barriers_do_not_conflict(checkpoints: dict[str, Path]) -> None:
    """Between two barriers, no operation writes what an earlier one reads: other threads may still be reading."""
    found = make_cpu_backend(checkpoints["gemma2"])._program
    for ops in ([*found.draw], [*found.trunk, *found.head]):
        assert num_without_barrier(ops) >= 4


def num_without_barrier(ops: list[Op]) -> int:
    """Return how many operations have none after them, once each has been found to need none."""
    written = sorted({place for op in ops for place in (op.y, op.scratch, op.raw) if place})
    group: set[int] = set()
    for op in ops:
        assert not {op.y, op.scratch, op.raw} - {None} & group
        places = [written[bisect.bisect(written, place) - 1] for place in (op.x, op.z) if place]
        group = group | {*places, op.y, op.scratch, op.raw} - {None} if op.no_barrier else set()
    return sum(op.no_barrier for op in ops)
