"""Many adapters in one pass: a row's bits follow from the row and its own adapter."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from quipu.kernels.cpu import program, recording
from quipu.kernels.cpu.program import Op
from tests.kernels.adapters.peft_adapters import make_adapter, targets_of, with_adapters
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import CPU_FORMATS, make_backend
from tests.kernels.one_prompt import Backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

LENGTHS = (37, 1, 5, 130, 18, 64, 9)
CASES = [
    *[pytest.param(make_backend, name, "float32", 1) for name in ("qwen3-odd", "gemma2")],
    *[
        pytest.param(partial(make_cpu_backend, num_threads=threads), name, numbers, threads, marks=needs_kernels)
        for name, numbers, threads in [
            ("qwen3-odd", "float32", 1),
            ("qwen3-odd", "bfloat16", 3),
            ("gemma2", "bfloat16", 2),
            ("qwen3-moe", "int8-bytes", 2),
            ("llama-rope3", "int4", 2),
            ("llama-rope3", "int8-kv", 3),
        ]
    ],
]
over_cases = pytest.mark.parametrize(("make", "name", "numbers", "threads"), CASES)


def load(backend: Backend, checkpoint: Path, name: str, folder: Path) -> list[str]:
    """Load two adapters of different ranks and modules; return none, the first and the second."""
    first = make_adapter(folder / "first", checkpoint, target_modules=targets_of(name), r=3)
    second = make_adapter(folder / "second", checkpoint, target_modules=["o_proj", "lm_head"], r=16)
    return ["", backend.load_adapter(first), backend.load_adapter(second)]


@over_cases
def test_rows_beside_others(
    checkpoints: dict[str, Path], tmp_path: Path, make: Callable[..., Backend], name: str, numbers: str, threads: int
) -> None:
    """Give each row, prefilled or decoding, the bits that it has alone, whichever adapters the others have."""
    backend = make(checkpoints[name], max_loras=3, **CPU_FORMATS[numbers])
    adapters = load(backend, checkpoints[name], name, tmp_path)
    tables = scattered_blocks(9 * len(LENGTHS), seed=4)
    rows: list[dict[str, Any]] = [
        {"token_ids": prompt(length, seed=length), "position": 0, "blocks": tables[9 * at : 9 * at + 9]}
        for at, length in enumerate(LENGTHS)
    ]
    chosen = [adapters[at % 3] for at in range(len(rows))]
    alone = []
    for row, adapter in zip(rows, chosen, strict=True):
        backend.cache.fill(float("nan"))
        batch = make_batch(row)
        # as it is without adapters anywhere, if it has none
        batch = with_adapters(batch, adapter) if adapter else batch
        alone.append(backend.logits(batch, list(range(len(row["token_ids"])))))
        assert alone[-1].isfinite().all()
    backend.cache.fill(float("nan"))
    together = with_adapters(make_batch(*rows), *chosen)
    assert torch.equal(backend.logits(together, list(range(sum(LENGTHS)))), torch.cat(alone))
    for order in (range(len(rows)), [3, 0, 6, 2, 5, 1, 4]):
        backend.cache.fill(float("nan"))
        prefix = [{**row, "token_ids": row["token_ids"][:-1]} for row in rows if len(row["token_ids"]) > 1]
        backend.logits(
            with_adapters(make_batch(*prefix), *(a for a, n in zip(chosen, LENGTHS, strict=True) if n > 1)), []
        )
        last = [{**rows[at], "token_ids": rows[at]["token_ids"][-1:], "position": LENGTHS[at] - 1} for at in order]
        found = backend.logits(with_adapters(make_batch(*last), *(chosen[at] for at in order)), list(range(len(rows))))
        assert torch.equal(found, torch.stack([alone[at][-1] for at in order]))


@over_cases
def test_draws(
    checkpoints: dict[str, Path], tmp_path: Path, make: Callable[..., Backend], name: str, numbers: str, threads: int
) -> None:
    """Draw, greedily, the tokens of the largest logits of each row's own adapter, also where few rows draw."""
    backend = make(checkpoints[name], max_loras=2, **CPU_FORMATS[numbers])
    adapters = load(backend, checkpoints[name], name, tmp_path)
    tables = scattered_blocks(12, seed=4)
    rows = [
        {"token_ids": prompt(20, seed=9), "position": 0, "blocks": tables[2 * at : 2 * at + 2], "samples": at % 3 != 1}
        for at in range(6)
    ]
    chosen = [adapters[at] for at in (2, 1, 0, 2, 1, 1)]
    batch = with_adapters(make_batch(*rows), *chosen)
    drawing = [at for at in range(6) if at % 3 != 1]
    drawn = backend.step(attrs.evolve(batch, slots=list(range(6))))
    logits = backend.logits(batch, [20 * at + 19 for at in drawing])
    assert drawn.rows == drawing
    assert drawn.token_ids == logits.argmax(-1).tolist()
    assert len({tuple(row.tolist()) for row in logits}) == 3, "each adapter has logits of its own"


@over_cases
def test_slots_are_used_again(
    checkpoints: dict[str, Path], tmp_path: Path, make: Callable[..., Backend], name: str, numbers: str, threads: int
) -> None:
    """Load into the slot of an adapter that was unloaded; refuse one more than there are slots, and rows of others."""
    backend = make(checkpoints[name], max_loras=2, **CPU_FORMATS[numbers])
    none, first, second = load(backend, checkpoints[name], name, tmp_path)
    batch = make_batch({"token_ids": prompt(40, seed=1), "position": 0, "blocks": scattered_blocks(3, seed=4)})
    before = [backend.logits(with_adapters(batch, each), [39]) for each in (none, first, second)]
    third = make_adapter(tmp_path / "third", checkpoints[name], r=5)
    with pytest.raises(ValueError, match="--max-loras"):
        backend.load_adapter(third)
    assert backend.load_adapter(tmp_path / "first") == first  # it is loaded
    backend.unload_adapter(first)
    backend.unload_adapter(first)
    with pytest.raises(ValueError, match="not loaded"):
        backend.logits(with_adapters(batch, first), [39])
    loaded = backend.load_adapter(third)
    assert len({none, first, second, loaded}) == 4
    assert torch.equal(backend.logits(with_adapters(batch, second), [39]), before[2])
    backend.unload_adapter(loaded)
    assert backend.load_adapter(tmp_path / "first", first) == first
    assert torch.equal(backend.logits(with_adapters(batch, first), [39]), before[1])
    assert torch.equal(backend.logits(with_adapters(batch, none), [39]), before[0])


@needs_kernels
@pytest.mark.parametrize("numbers", ["bfloat16", "int8"])
def test_passes_without_adapters_run_what_they_ran_before(checkpoints: dict[str, Path], numbers: str) -> None:
    """Have the same operations, fused alike, whether or not adapters may be loaded."""
    programs = [
        make_cpu_backend(checkpoints["qwen3-odd"], max_loras=most, **CPU_FORMATS[numbers])._program for most in (0, 2)
    ]
    names = [name for name, kind, *_ in Op._fields_ if kind is not ctypes.c_void_p]
    for part in ("keys", "draw", "trunk", "head"):
        without, beside = ([[getattr(op, name) for name in names] for op in getattr(each, part)] for each in programs)
        assert without == beside


@needs_kernels
@pytest.mark.parametrize(
    ("name", "numbers"), [("qwen3-odd", "bfloat16"), ("gemma2", "float32"), ("llama-rope3", "int8")]
)
def test_fused_bits_equal_unfused(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the same bits with fused operations, and results that are stored rounded, as with neither."""
    tables = scattered_blocks(24, seed=3)
    rows = [
        {"token_ids": prompt(n, seed=n), "position": 0, "blocks": tables[i * 8 :][:8]}
        for i, n in enumerate((99, 5, 30))
    ]

    def logits() -> tuple[torch.Tensor, int]:
        backend = make_cpu_backend(checkpoints[name], num_threads=2, max_loras=2, **CPU_FORMATS[numbers])
        adapters = load(backend, checkpoints[name], name, tmp_path / str(len(list(tmp_path.iterdir()))))
        assert backend._adapted is not None
        return backend.logits(with_adapters(make_batch(*rows), *adapters), [0, 98, 103, 133]), len(
            backend._adapted.draw
        )

    fused, num_fused = logits()
    monkeypatch.setattr(recording, "store_rounded", lambda calls, values: None)
    assert torch.equal(logits()[0], fused)
    monkeypatch.setattr(recording, "fuse", list)
    plain, num_plain = logits()
    assert num_fused < num_plain
    assert torch.equal(plain, fused)


@needs_kernels
def test_operations_per_layer(checkpoints: dict[str, Path]) -> None:
    """Run one more operation for each product, and fuse everything that is fused without adapters."""
    backend = make_cpu_backend(checkpoints["qwen3-tied"], dtype="bfloat16", max_loras=1)
    assert backend._adapted is not None
    kinds = Counter(op.kind for op in backend._adapted.draw)
    without = Counter(op.kind for op in backend._program.draw)
    assert kinds == without + Counter({program.LOW_RANK: without[program.LINEAR]})
    rounded = [[op.kind for op in each.trunk if op.y_rounded] for each in (backend._adapted, backend._program)]
    assert rounded[0] == rounded[1]
