"""Sampling on the device returns the oracle's tokens, in the interpreter."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.logit_processors import LogitProcessor, Processing
from quipu.kernels.sampling.oracle import draw, fields_besides
from quipu.kernels.step_types import LogitRules, RowSampling
from quipu.kernels.triton import sampler
from tests.triton_kernels.interpreter import CpuDevice
from tests.triton_kernels.passes import make_batch

V = 100


def batch_of(settings: list[dict[str, Any]], **columns: list[Any]) -> StepBatch:
    """Make a batch with one row for each of these settings, and seeds that need all 64 bits."""
    batch = make_batch(*({"length": 1, "position": 0, "blocks": [1]} for _ in settings))
    rows = [RowSampling(**one, seed=(1 << 63) + 977 * index) for index, one in enumerate(settings)]
    return attrs.evolve(batch, sampling=rows, **columns)


def draw_both(batch: StepBatch, logits_MV: torch.Tensor) -> tuple[list[int | None], list[int | None]]:
    rows = list(range(len(logits_MV)))
    ours = sampler.Sampler(16, CpuDevice()).begin(batch, rows, logits_MV, rows).read(batch, rows)
    return ours, draw(batch, rows, logits_MV.numpy())


@pytest.mark.parametrize("seed", range(6))
def test_same_tokens_as_the_oracle(seed: int) -> None:
    """Sample the oracle's token for the same seed, with any combination of filters and many equal logits."""
    pick = random.Random(seed)
    count = 8
    logits_MV = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (count, V)).astype(np.float32))
    logits_MV[: count // 2] = (2 * logits_MV[: count // 2]).round() / 2  # ties at every threshold
    settings = [
        {
            "temperature": pick.choice([0.0, 0.3, 1.0, 2.5]),
            "top_k": pick.choice([0, 1, 5, 40, 1000]),
            "top_p": pick.choice([1.0, 0.95, 0.5, 0.01]),
            "min_p": pick.choice([0.0, 0.05, 0.5]),
        }
        for _ in range(count)
    ]
    batch = batch_of(settings, output_position=[pick.randrange(1 << 33) for _ in range(count)])
    ours, theirs = draw_both(batch, logits_MV)
    assert ours == theirs


@pytest.mark.parametrize("seed", range(3))
def test_masks(seed: int) -> None:
    """Rows with a mask and nothing else are drawn on the device, like by the oracle; shorter and longer masks fit;
    one that allows nothing, or is missing, fails its row alone.
    """
    rng, count = np.random.default_rng(seed), 8
    logits_MV = torch.from_numpy(rng.normal(0, 3, (count, V)).astype(np.float32))
    raw_MV = logits_MV.clone()
    none_within = bytes(12) + b"\xf0\0\0\0"
    masks: list[bytes | str] = [rng.bytes(16), b"\0\0\1\0", "It fails.", none_within, rng.bytes(32), b"\2\0\0\0"]
    rules = LogitRules(allowed_token_ids=(3,)), LogitRules(bias={5: 9.0})
    processors = [LogitProcessor(one, [], []) for one in rules]
    settings = [{"temperature": index % 2, "top_k": 3 * index % 7, "top_p": 0.8} for index in range(count)]
    processing = Processing([6, 7], processors, [1, 2, 3, 4, 5, 6], lambda: masks)
    batch, rows = batch_of(settings, processing=processing), list(range(count))
    ours = sampler.Sampler(16, CpuDevice()).begin(batch, rows, logits_MV, rows).read(batch, rows)
    failed = dict(processing.failures)
    processing.failures.clear()
    assert ours == draw(batch, rows, logits_MV.numpy())
    assert failed == processing.failures and set(failed) == {3, 4, 6}
    assert torch.equal(logits_MV, raw_MV)


@pytest.mark.parametrize("filters", [{"top_p": 0.305}, {"top_k": 7}, {"top_k": 20, "top_p": 0.51}])
def test_threshold_among_ties(filters: dict[str, float]) -> None:
    """Keep the same lowest ids as the host if all logits are equal."""
    count = 6
    ours, theirs = draw_both(batch_of([{"temperature": 1.0, **filters}] * count), torch.zeros(count, V))
    assert ours == theirs


def test_tiny_temperatures() -> None:
    """Draw among the likeliest tokens, also where float32 holds no inverse of the temperature."""
    logits_MV = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (6, V)).astype(np.float32)).round()
    ours, theirs = draw_both(
        batch_of([{"temperature": t} for t in (5e-324, 1e-45, 1e-40, 4e-39, 1e-38, 1e-20)]), logits_MV
    )
    assert ours == theirs
    assert len(set(ours)) > 1


def test_unknown_fields_are_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw on the host exactly the rows that set a field which the device does not apply."""
    on_host: list[list[int]] = []

    def draw_on_host(batch: StepBatch, rows: list[int], logits_MV: Any) -> list[int | None]:
        on_host.append(rows)
        return draw(batch, rows, logits_MV)

    monkeypatch.setattr(sampler, "draw", draw_on_host)
    monkeypatch.setattr(sampler, "LEFT_TO_ORACLE", fields_besides(sampler.APPLIED - {"min_p"}))
    batch = batch_of([{"temperature": 1.0, "min_p": min_p} for min_p in (0.0, 0.2, 0.0, 0.3)])
    ours, theirs = draw_both(batch, torch.linspace(0, 3, V).repeat(4, 1))
    assert ours == theirs
    assert on_host == [[1, 3]]


def test_applied_fields_exist() -> None:
    """Name only fields of `RowSampling`; those that it has besides are the host's."""
    assert attrs.fields_dict(RowSampling).keys() - sampler.LEFT_TO_ORACLE.keys() == sampler.APPLIED
