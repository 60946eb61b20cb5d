"""After the last attention a step computes only the rows that draw: less work, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu import program, recording
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.cpu.program import Op
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import CPU_FORMATS, IN_EACH_CPU_FORMAT
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

pytestmark = needs_kernels

BLOCKS = scattered_blocks(80, seed=11)
LENGTHS = (230, 70, 19, 4)


def sequence(index: int, first: int, last: int, **changes: Any) -> dict[str, Any]:
    """Return a row with tokens `first` to `last` of sequence `index`."""
    tokens = prompt(LENGTHS[index] + 2, seed=index)[first:last]
    return {"slot": index, "token_ids": tokens, "position": first, "blocks": BLOCKS[index * 20 :][:20], **changes}


def passes() -> list[StepBatch]:
    """Return passes from which nothing is drawn, every row draws, and some do, in prompts of several pieces."""
    whole = [sequence(index, 0, length) for index, length in enumerate(LENGTHS)]
    return [
        make_batch(sequence(0, 0, 130, samples=False), sequence(1, 0, 33, samples=False)),
        make_batch(sequence(0, 130, 230), sequence(1, 33, 60, samples=False), sequence(2, 0, 19)),
        make_batch(sequence(0, 230, 231), sequence(1, 60, 70), sequence(2, 19, 20, samples=False), sequence(3, 0, 4)),
        make_batch(*(sequence(index, length, length + 1) for index, length in enumerate(LENGTHS))),
        make_batch(*whole),
        make_batch(*whole[:2], sequence(2, 0, 19, samples=False), sequence(3, 0, 4)),
    ]


def last_tokens(batch: StepBatch) -> list[int]:
    return [batch.query_start[row + 1] - 1 for row, samples in enumerate(batch.samples) if samples]


def drawn_logits(backend: CpuBackend, batch: StepBatch) -> torch.Tensor:
    """Return what a step draws from."""
    return backend._run(backend._pass(batch), last_tokens(batch)).clone()


@pytest.mark.covering
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("of", IN_EACH_CPU_FORMAT, ids="-".join)
def test_bits_of_all_rows(
    checkpoints: dict[str, Path], of: tuple[str, str], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits have the bits of a pass in which every row runs, and leave the keys and values that later passes need."""
    if not fused:
        monkeypatch.setattr(recording, "fuse", list)
    name, numbers = of
    narrow, wide = (make_cpu_backend(checkpoints[name], **CPU_FORMATS[numbers]) for _ in range(2))
    for number, batch in enumerate(passes()):
        narrow.num_threads = 1 + number % 2
        assert torch.equal(drawn_logits(narrow, batch), wide.logits(batch, last_tokens(batch)))


def test_less_work(checkpoints: dict[str, Path]) -> None:
    """Nothing follows the last attention for keys alone; for logits, what follows is on the rows that draw."""
    found = make_cpu_backend(checkpoints["qwen3-moe"])._program
    last = max(index for index, op in enumerate(found.draw) if op.kind == program.ATTEND)
    assert len(found.keys) == last + 1 < len(found.trunk)
    assert [op.on_logits_rows for op in found.draw] == [0] * last + [1] * (len(found.draw) - last)
    assert not any(op.on_logits_rows for op in found.trunk)


def test_queries_that_nothing_reads(checkpoints: dict[str, Path]) -> None:
    """The last layer's product of queries, keys and values computes queries for rows that draw alone."""
    for name in ("qwen3-tied", "llama", "gemma2"):
        found = make_cpu_backend(checkpoints[name])._program
        attention = found.keys[-1]
        queries = attention.num_heads * attention.width
        assert [op.drawn_columns for op in found.keys if op.drawn_columns] == [queries]
        assert not any(op.drawn_columns for op in [*found.trunk, *found.head])
        (product,) = (op for op in found.keys if op.drawn_columns)
        assert product.y == attention.x and product.out_width > queries


@torch.inference_mode()
@pytest.mark.parametrize("numbers", CPU_FORMATS)
def test_columns_that_nothing_reads(checkpoints: dict[str, Path], numbers: str) -> None:
    """The last product skips queries of pieces from which nothing is drawn, and no keys or values."""
    backend = make_cpu_backend(checkpoints["qwen3-tied"], **CPU_FORMATS[numbers])
    (product,) = (op for op in backend._program.keys if op.drawn_columns)
    product.joined = None  # so that it stores all that it computes
    one_pass = backend._pass(make_batch(sequence(0, 0, 230)))
    backend._run(one_pass, [])
    memory = next(tensor for tensor in backend._program.workspace if tensor.data_ptr() == product.y)
    rows = memory[: 230 * product.y_stride].view(230, -1)
    rows.fill_(float("nan"))
    one_pass.run(backend._library, (Op * 1)(product), [229])
    assert rows[:, product.drawn_columns :].isfinite().all()
    assert rows[229].isfinite().all() and rows[:100, : product.drawn_columns].isnan().any()


@torch.inference_mode()
def test_pieces_that_nothing_reads(checkpoints: dict[str, Path]) -> None:
    """The last attention skips tokens that draw nothing: their results are not written."""
    backend = make_cpu_backend(checkpoints["llama"])
    attention, one_pass = backend._program.keys[-1], backend._pass(make_batch(sequence(0, 0, 230)))
    backend._run(one_pass, [])
    memory = next(tensor for tensor in backend._program.workspace if tensor.data_ptr() == attention.y)
    memory.fill_(float("nan"))
    one_pass.run(backend._library, (Op * 1)(attention), [229])
    results = memory[: 230 * attention.y_stride].view(230, -1)
    assert results[229].isfinite().all() and results[:100].isnan().all()
