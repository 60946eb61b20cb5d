"""Scores in C++ compared with their oracle, `logprobs.score`: the same ids and ranks, and more accurate logprobs.

On every instruction set, emulated if the processor lacks it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quipu.kernels.cpu.scores import score
from quipu.kernels.sampling.logprobs import score as oracle
from quipu.kernels.step_types import Scores
from tests.kernels.cpu.cpu_paths import PATHS, CpuPath, kernels_of

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it

Logits = npt.NDArray[np.float32]
Exact = npt.NDArray[np.float64]

VOCABULARY = 151_936
KINDS = ["random", "flat", "steep", "tied", "equal", "masked", "far"]

over_paths = pytest.mark.parametrize("path", PATHS, ids=str)


def logits_of(kind: str, rows: int, size: int) -> Logits:
    rng = np.random.default_rng(size)
    drawn = rng.normal(0, 1, (rows, size))
    match kind:
        case "random":
            drawn *= 3
        case "flat":
            drawn *= 0.02
        case "steep":
            drawn *= 30
        case "tied":
            drawn = rng.integers(-2, 3, (rows, size)).astype(np.float64)
        case "equal":
            # all but one, so far above that differences and exp are least accurate but the others still matter
            drawn[:] = 0.3
            drawn[:, size // 2] += np.linspace(12.5 * math.log(2), 12, rows)
        case "masked":
            drawn[rng.random((rows, size)) < 0.7] = -np.inf
            drawn[:, size // 2] = 1
        case "far":
            drawn = drawn * 2 + 500
    return drawn.astype(np.float32)


def exact_logprobs(logits: Logits) -> Exact:
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    exact: Exact = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    return exact


def scored(
    path: CpuPath, logits: Logits, target_ids: list[int], num_top: list[int], *, num_threads: int = 1, **others: Any
) -> Scores:
    rows = others.get("rows", range(len(logits)))
    return score(kernels_of(path).library, logits, rows, target_ids, num_top, num_threads=num_threads)


def check(ours: Scores, logits: Logits, target_ids: list[int], num_top: list[int]) -> None:
    """Check ids and ranks against the oracle, and logprobs against exact ones, to 1e-6 plus rounding to float32."""
    theirs = oracle(torch.from_numpy(logits), target_ids, num_top)
    assert (ours.token_ids, ours.ranks, ours.top_ids) == (theirs.token_ids, theirs.ranks, theirs.top_ids)
    exact = exact_logprobs(logits)
    for row, (target_id, top_ids) in enumerate(zip(target_ids, ours.top_ids, strict=True)):
        found = np.array([ours.logprobs[row], *ours.top_logprobs[row]])
        expected = exact[row, [target_id, *top_ids]]
        assert (np.isinf(found) == np.isinf(expected)).all()
        finite = np.isfinite(expected)
        rounding = np.spacing(np.abs(expected[finite]).astype(np.float32)) / 2
        assert (np.abs(found[finite] - expected[finite]) <= 1e-6 + rounding).all(), (row, found, expected)


@pytest.mark.covering
@over_paths
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 255, 256, 257, 4999])
def test_ids_ranks_and_values(path: CpuPath, kind: str, size: int) -> None:
    """Match the oracle for all kinds of rows, sizes that end within a vector, block or group, and any top count."""
    counts = [0, 1, 2, 5, 20, size // 2, size, size + 7]
    logits = logits_of(kind, len(counts), size)
    for seed in range(3):
        target_ids = np.random.default_rng(seed).integers(0, size, len(counts)).tolist()
        check(scored(path, logits, target_ids, counts), logits, target_ids, counts)


@over_paths
@pytest.mark.parametrize("kind", KINDS)
def test_large_vocabulary(path: CpuPath, kind: str) -> None:
    """Stay as accurate when 151,936 masses are summed, for the most likely token and for others."""
    logits = logits_of(kind, 3, VOCABULARY)
    target_ids = [int(logits[0].argmax()), 17, VOCABULARY - 1]
    check(scored(path, logits, target_ids, [20, 0, 5]), logits, target_ids, [20, 0, 5])


@over_paths
@given(
    row=st.lists(
        st.sampled_from([-math.inf, -88.0, -3.0, -0.0, 0.0, 1e-40, 0.5, 0.5, 2.0, 1e38]), min_size=1, max_size=150
    ),
    data=st.data(),
)
def test_few_values(path: CpuPath, row: list[float], data: st.DataObject) -> None:
    """Match the oracle if nearly all logits are tied, masked, denormal or huge; 0.0 and -0.0 are equal."""
    row[data.draw(st.integers(0, len(row) - 1))] = 2.0  # at least one finite logit
    logits = np.array([row], np.float32)
    target_ids, num_top = [data.draw(st.integers(0, len(row) - 1))], [data.draw(st.integers(0, len(row) + 1))]
    check(scored(path, logits, target_ids, num_top), logits, target_ids, num_top)


@over_paths
def test_row_does_not_depend_on_others(path: CpuPath) -> None:
    """Compute the same bits for a row alone and among others, in any order, on any threads, with any row stride."""
    logits = np.concatenate([logits_of(kind, 3, 1777) for kind in KINDS])
    count = len(logits)
    target_ids, num_top = [37 * row % 1777 for row in range(count)], [row % 7 * 3 for row in range(count)]
    alone = Scores.empty()
    for row in range(count):
        one = slice(row, row + 1)
        alone.extend(scored(path, logits[one].copy(), target_ids[one], num_top[one]))
    for num_threads in (1, 2, 3, 8):
        assert scored(path, logits, target_ids, num_top, num_threads=num_threads) == alone
        for size in (2, 5, 13):
            part = slice(3, 3 + size)
            found = scored(path, logits[part], target_ids[part], num_top[part], num_threads=num_threads)
            assert found == alone.cut(3, 3 + size)
    for gap in (1, 3, 63):
        wide = np.full((count, 1777 + gap), np.nan, np.float32)
        wide[:, :1777] = logits
        assert scored(path, wide[:, :1777], target_ids, num_top, num_threads=2) == alone
    backwards = range(count)[::-1]
    found = scored(path, logits, target_ids[::-1], num_top[::-1], rows=backwards, num_threads=2)
    found_again = Scores.empty()
    for row in backwards:
        found_again.extend(found.cut(row, row + 1))
    assert found_again == alone


@pytest.mark.covering
@over_paths
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 7, 70, 255, 256, 263])
def test_nan_or_infinite_logits(path: CpuPath, bad: float, index: int) -> None:
    """Raise as the oracle does, at any index, and name the first such row's token."""
    logits = np.zeros((4, 264), np.float32)
    logits[[1, 3], index] = bad
    messages = []
    for run in (
        lambda: scored(path, logits, [5, 6, 7, 8], [2] * 4),
        lambda: oracle(torch.from_numpy(logits), [5, 6, 7, 8], [2] * 4),
    ):
        with pytest.raises(ArithmeticError) as raised:
            run()
        messages.append(str(raised.value))
    assert messages == ["cannot score token 6: its logits hold NaN or have no finite maximum"] * 2
    good = scored(path, logits, [5, 7], [2, 2], rows=[0, 2])
    assert good.top_ids == [[0, 1], [0, 1]]


@over_paths
@pytest.mark.parametrize("size", [1, 8, 300])
def test_all_logits_minus_infinity(path: CpuPath, size: int) -> None:
    """Raise for a row of only minus infinity; a single possible token has a probability of 1."""
    logits = np.full((1, size), -np.inf, np.float32)
    with pytest.raises(ArithmeticError, match="token 0:"):
        scored(path, logits, [0], [0])
    logits[0, size - 1] = -3
    assert scored(path, logits, [size - 1], [1]) == Scores([size - 1], [0.0], [1], [[size - 1]], [[0.0]])
    if size > 1:
        assert scored(path, logits, [0], [0]) == Scores([0], [-math.inf], [2], [[]], [[]])


@over_paths
def test_out_of_range_tokens_and_rows(path: CpuPath) -> None:
    """Return no scores for no rows; refuse an out-of-range token or row instead of reading it."""
    logits = np.zeros((2, 40), np.float32)
    assert scored(path, logits, [], [], rows=[]) == Scores.empty()
    assert scored(path, logits[:0], [], []) == Scores.empty()
    for target_id in (-1, 40):
        with pytest.raises(IndexError, match="target_id"):
            scored(path, logits, [3, target_id], [0, 0])
    for row in (-1, 2):
        with pytest.raises(IndexError, match="row"):
            scored(path, logits, [3], [0], rows=[row])
