"""`TritonBackend` on the interpreter: the reference's logits and tokens, in every mode of running a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_checkpoints import backend_config, make_backend, make_batch, prompt, scattered_blocks

from quipu.kernels.triton.backend import TritonBackend
from quipu.kernels.triton.configs import SMALL
from quipu.kernels.triton.device import CpuDevice

TOKENS = prompt(40, seed=3)
BLOCKS = scattered_blocks(3, seed=1)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 48}


class CountingDevice(CpuDevice):
    """Counts what was captured."""

    def __init__(self) -> None:
        self.num_captured = 0

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_captured += 1
        return super().capture(work)


def make_triton(model_path: Path, **changes: Any) -> TritonBackend:
    """A backend whose whole pool is NaN: whatever reads a slot that nobody wrote shows."""
    backend = TritonBackend(backend_config(model_path, **(SIZES | changes)), CountingDevice(), SMALL)
    backend.cache.fill(float("nan"))
    return backend


def row(start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"token_ids": TOKENS[start:end], "position": start, "blocks": BLOCKS, **more}


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-rope3"])
def test_logits_are_the_references(checkpoints: dict[str, Path], name: str) -> None:
    """A prompt in two chunks, then a decoded token, beside another row each time."""
    ours, theirs = make_triton(checkpoints[name]), make_backend(checkpoints[name])
    other = {"token_ids": prompt(3, seed=9), "position": 0, "blocks": scattered_blocks(4, seed=1)[3:]}
    for start, end in ((0, 17), (17, 36), (36, 37)):
        batch = make_batch(other, row(start, end, slot=1))
        wanted = list(range(3 + end - start))
        torch.testing.assert_close(ours.logits(batch, wanted), theirs.logits(batch, wanted), atol=1e-4, rtol=0)
