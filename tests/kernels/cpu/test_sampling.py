"""The C++ sampler always draws the oracle's token (`sampling/oracle.py`)."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu import sampler
from quipu.kernels.cpu.build import load
from quipu.kernels.cpu.instruction_sets import choose_instruction_set, processor_flags
from quipu.kernels.cpu.sampler import decided, draw, draw_bfloat16
from quipu.kernels.sampling.oracle import draw as oracle
from quipu.kernels.sampling.oracle import fields_besides
from quipu.kernels.step_types import RowSampling
from tests.kernels.cpu.cpu_backends import needs_kernels
from tests.kernels.step_batches import make_batch

pytestmark = needs_kernels

Logits = npt.NDArray[np.float32]
OFF = {"temperature": 1.0}


def library() -> Any:
    return load(choose_instruction_set(processor_flags()))


def batch_of(settings: list[dict[str, Any]]) -> StepBatch:
    return make_batch(*({"token_ids": [1], "position": 0, "blocks": [1], **one} for one in settings))


def random_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.0, 0.05, 0.3, 0.7, 1.0, 1.0, 1.5, 5.0]),
        "top_k": rng.choice([0, 0, 1, 2, 20, 50, 3000]),
        "top_p": rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6]),
        "min_p": rng.choice([0.0, 0.0, 0.02, 0.5, 1e-12]),
        "seed": rng.getrandbits(64),
        "output_position": rng.choice([0, 1, 77, 1 << 33]),
    }


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0, 12.0])
def test_same_tokens_as_the_oracle(spread: float, num_threads: int) -> None:
    """Match the oracle for flat and steep distributions and all settings, almost always without calling it."""
    rng, rounds, num_sure = random.Random(spread), 12, 0
    for seed in range(rounds):
        logits = np.random.default_rng(seed).normal(0, spread, (8, 4999)).astype(np.float32)
        batch = batch_of([random_settings(rng) for _ in range(8)])
        expected = oracle(batch, range(8), logits)
        assert draw(library(), batch, range(8), logits, num_threads=num_threads) == expected
        sure = decided(library(), batch, range(8), logits, num_threads=num_threads)
        assert all(token_id in (None, wanted) for token_id, wanted in zip(sure, expected, strict=True))
        num_sure += sum(token_id is not None for token_id in sure)
    assert num_sure >= 0.98 * 8 * rounds


@pytest.mark.parametrize("size", [1, 37, 64, 4999])
def test_bfloat16_logits(size: int) -> None:
    """Draw the oracle's tokens of the widened logits, in whatever places they are; NaN yields none."""
    rng = random.Random(size)
    floats = np.random.default_rng(size).normal(0, 3, (9, size + 3)).astype(np.float32)
    bits_PV = (floats.view(np.uint32) >> 16).astype(np.uint16)[:, :size]  # rows with a stride of their own
    bits_PV[4, size // 2] = 0x7FC0  # NaN
    widened = (bits_PV.astype(np.uint32) << 16).view(np.float32)
    places = [8, 0, 4, 3, 7]
    batch = batch_of([random_settings(rng) for _ in range(7)])
    rows = [0, 2, 3, 5, 6]
    found = draw_bfloat16(library(), batch, rows, bits_PV, places, num_threads=2)
    assert found == oracle(batch, rows, widened[places])
    assert found[2] is None and None not in (found[:2] + found[3:])


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 3}, {"top_k": 40}, {"top_p": 0.5}, {"top_p": 0.6, "top_k": 5}, {"min_p": 0.3}, {"temperature": 0.0}],
)
def test_ties(settings: dict[str, Any]) -> None:
    """Match the oracle where groups of logits are equal, so that every threshold is on a tie."""
    rng = np.random.default_rng(1)
    logits = rng.integers(-2, 3, (60, 700)).astype(np.float32)
    batch = batch_of([{**OFF, "seed": seed, **settings} for seed in range(60)])
    assert draw(library(), batch, range(60), logits, num_threads=1) == oracle(batch, range(60), logits)


def test_masked_tokens_and_short_rows() -> None:
    """Never draw logits of minus infinity, as masks and bans leave them, for any vocabulary size."""
    rng = np.random.default_rng(2)
    for size in (1, 2, 7, 63, 64, 65, 130):
        logits = rng.normal(0, 2, (20, size)).astype(np.float32)
        logits[:, rng.permutation(size)[: size // 2]] = -np.inf
        for settings in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}):
            batch = batch_of([{**OFF, "seed": seed, **settings} for seed in range(20)])
            assert draw(library(), batch, range(20), logits, num_threads=1) == oracle(batch, range(20), logits)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_or_infinite_logits(bad: float, temperature: float) -> None:
    """Draw nothing from such a row, as the oracle does, wherever the value is; other rows are drawn."""
    for index in (0, 70, 128):
        logits = np.zeros((2, 129), np.float32)
        logits[1, index] = bad
        batch = batch_of([{**OFF, "temperature": temperature}] * 2)
        drawn = draw(library(), batch, range(2), logits, num_threads=1)
        assert drawn == oracle(batch, range(2), logits)
        assert drawn[0] is not None and drawn[1] is None


def test_extreme_temperatures_are_left_to_the_oracle() -> None:
    """Leave rows to the oracle where the error bounds of the C++ code do not hold."""
    logits = np.random.default_rng(3).normal(0, 2, (4, 300)).astype(np.float32)
    batch = batch_of([{**OFF, "temperature": t, "seed": 5} for t in (1e-9, 1e-4, 1e4, 1e30)])
    assert decided(library(), batch, range(4), logits, num_threads=1) == [None] * 4
    assert draw(library(), batch, range(4), logits, num_threads=1) == oracle(batch, range(4), logits)


def test_threshold_on_a_tie_is_left_to_the_oracle() -> None:
    """Leave the row to the oracle if a mass equals top_p to the last bit, so that rounding decides."""
    logits = np.zeros((1, 4), np.float32)
    for top_p, sure in ((0.5, False), (0.75, False), (0.6, True)):
        batch = batch_of([{**OFF, "top_p": top_p, "seed": 1}])
        assert (decided(library(), batch, range(1), logits, num_threads=1) != [None]) == sure
        assert draw(library(), batch, range(1), logits, num_threads=1) == oracle(batch, range(1), logits)


def test_unknown_fields_are_left_to_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave to the oracle exactly the rows that set a field which the C code does not apply."""
    monkeypatch.setattr(sampler, "LEFT_TO_ORACLE", fields_besides(sampler.APPLIED - {"min_p"}))
    logits = np.random.default_rng(4).normal(0, 2, (4, 300)).astype(np.float32)
    batch = batch_of([{**OFF, "seed": 5, "min_p": min_p} for min_p in (0.0, 0.1, 0.0, 0.2)])
    sure = decided(library(), batch, range(4), logits, num_threads=1)
    assert [token_id is None for token_id in sure] == [False, True, False, True]
    assert draw(library(), batch, range(4), logits, num_threads=1) == oracle(batch, range(4), logits)


def test_applied_fields_exist() -> None:
    """Name only fields of `RowSampling`; those that it has besides are the oracle's."""
    assert attrs.fields_dict(RowSampling).keys() - sampler.LEFT_TO_ORACLE.keys() == sampler.APPLIED
