"""One prompt, fed in whatever chunks: what the invariance tests of both backends compare."""

from __future__ import annotations

import torch
from kernel_checkpoints import make_batch, prompt

from quipu.kernels.cpu.backend import CpuBackend
from quipu.kernels.reference.backend import ReferenceBackend

Backend = CpuBackend | ReferenceBackend

LENGTH = 520
LOOKED_AT = 8
TOKENS = prompt(LENGTH, seed=3)


def run_chunks(
    backend: CpuBackend | ReferenceBackend, blocks: list[int], chunks: list[int], *, start: int = 0
) -> torch.Tensor:
    """Feed TOKENS from `start` in chunks, alone; logits of the last LOOKED_AT positions."""
    results, position = [], start
    for size in chunks:
        batch = make_batch({"token_ids": TOKENS[position : position + size], "position": position, "blocks": blocks})
        wanted = [i for i in range(size) if position + i >= LENGTH - LOOKED_AT]
        results.append(backend.logits(batch, wanted))
        position += size
    assert position == LENGTH
    return torch.cat(results)
