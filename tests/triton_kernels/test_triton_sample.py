"""Draws on the device are the reference sampler's, on the interpreter."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.sampling.oracle import draw
from quipu.kernels.triton.device import CpuDevice
from quipu.kernels.triton.sampler import Sampler
from tests.triton_kernels.passes import make_batch

V = 100


def sampling(count: int, **columns: list[Any]) -> StepBatch:
    batch = make_batch(*({"length": 1, "position": 0, "blocks": [1]} for _ in range(count)))
    return attrs.evolve(batch, seed=[(1 << 63) + 977 * i for i in range(count)], **columns)


def draw_both(batch: StepBatch, logits_MV: torch.Tensor) -> tuple[list[int], list[int]]:
    rows = list(range(len(logits_MV)))
    ours = Sampler(16, CpuDevice()).begin(batch, rows, logits_MV, rows).read(rows)
    return ours, draw(batch, rows, logits_MV.numpy())


@pytest.mark.parametrize("seed", range(6))
def test_draws_are_the_hosts(seed: int) -> None:
    """Any mix of filters, with many equal logits: the token that `kernels/sampling.py` draws for the same seed."""
    pick = random.Random(seed)
    count = 8
    logits_MV = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (count, V)).astype(np.float32))
    logits_MV[: count // 2] = (2 * logits_MV[: count // 2]).round() / 2  # ties at every border
    batch = sampling(
        count,
        temperature=[pick.choice([0.0, 0.3, 1.0, 2.5]) for _ in range(count)],
        top_k=[pick.choice([0, 1, 5, 40, 1000]) for _ in range(count)],
        top_p=[pick.choice([1.0, 0.95, 0.5, 0.01]) for _ in range(count)],
        min_p=[pick.choice([0.0, 0.05, 0.5]) for _ in range(count)],
        output_position=[pick.randrange(1 << 33) for _ in range(count)],
    )
    ours, theirs = draw_both(batch, logits_MV)
    assert ours == theirs


@pytest.mark.parametrize("filters", [{"top_p": 0.305}, {"top_k": 7}, {"top_k": 20, "top_p": 0.51}])
def test_a_border_among_equals(filters: dict[str, float]) -> None:
    """Where all tokens are equal, a filter keeps as many of the lowest ids as the host's."""
    count = 6
    columns = {name: [value] * count for name, value in filters.items()}
    ours, theirs = draw_both(sampling(count, temperature=[1.0] * count, **columns), torch.zeros(count, V))
    assert ours == theirs
