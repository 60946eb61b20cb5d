"""Operations that are fused: fewer of them, and the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_backends import make_cpu_backend, needs_kernels
from kernel_checkpoints import CONFIGS, make_batch, prompt, scattered_blocks

from quipu.kernels.cpu import program, recorder
from quipu.kernels.cpu.backend import CpuBackend

pytestmark = needs_kernels


def logits_of(backend: CpuBackend) -> torch.Tensor:
    """Prefills of many and of few rows, and a decode of several."""
    tables = scattered_blocks(40, seed=3)
    rows = [
        {"token_ids": prompt(n, seed=n), "position": 0, "blocks": tables[i * 8 :][:8]} for i, n in enumerate((99, 5))
    ]
    many = backend.logits(make_batch(*rows), [0, 98, 103])
    decodes: list[dict[str, Any]] = [
        {"token_ids": [7], "position": 99, "blocks": tables[:8]},
        {"token_ids": [9], "position": 5, "blocks": tables[8:16]},
    ]
    return torch.cat([many, backend.logits(make_batch(*decodes), [0, 1])])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bits_of_one_by_one(
    checkpoints: dict[str, Path], name: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose operations are fused gives exactly what it gives operation by operation."""
    fused = make_cpu_backend(checkpoints[name], num_threads=num_threads, dtype="bfloat16")
    ours = logits_of(fused)
    monkeypatch.setattr(recorder, "fuse", list)
    plain = make_cpu_backend(checkpoints[name], num_threads=num_threads, dtype="bfloat16")
    assert len(fused._program.whole) < len(plain._program.whole)
    assert torch.equal(ours, logits_of(plain))


def test_what_a_layer_comes_to(checkpoints: dict[str, Path]) -> None:
    """Five operations a layer: two norms, two ropes, the write, the activation and both additions are in others."""
    for name in ("qwen3-tied", "llama"):
        kinds = Counter(op.kind for op in make_cpu_backend(checkpoints[name])._program.whole)
        layers = 2
        assert kinds == {
            program.EMBED: 1,
            program.GATHER: 1,
            program.LINEAR: 4 * layers + 1,
            program.ATTEND: layers,
        }
