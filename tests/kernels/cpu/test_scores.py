"""Scores in C against their oracle, `logprobs.score`: the same ids and ranks, and logprobs nearer to the exact ones.

On every instruction set that kernels exist for, emulated where the processor lacks it.
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

from quipu.kernels.batch import Scores
from quipu.kernels.cpu.scores import score
from quipu.kernels.sampling.logprobs import score as oracle
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
        case "equal":  # all but one, which is so far above that differences and exp are at their worst and still matter
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
    """Ids and ranks are the oracle's; a logprob is exact but for 1e-6 and its rounding to float32."""
    theirs = oracle(torch.from_numpy(logits), target_ids, num_top)
    assert (ours.token_ids, ours.ranks, ours.top_ids) == (theirs.token_ids, theirs.ranks, theirs.top_ids)
    exact = exact_logprobs(logits)
    for row, (target_id, top_ids) in enumerate(zip(target_ids, ours.top_ids, strict=True)):
        told = np.array([ours.logprobs[row], *ours.top_logprobs[row]])
        wanted = exact[row, [target_id, *top_ids]]
        assert (np.isinf(told) == np.isinf(wanted)).all()
        finite = np.isfinite(wanted)
        rounding = np.spacing(np.abs(wanted[finite]).astype(np.float32)) / 2
        assert (np.abs(told[finite] - wanted[finite]) <= 1e-6 + rounding).all(), (row, told, wanted)


@over_paths
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 255, 256, 257, 4999])
def test_ids_ranks_and_values(path: CpuPath, kind: str, size: int) -> None:
    """All kinds of rows, sizes that end within a vector, a block or a group, none of the likeliest to more than all."""
    counts = [0, 1, 2, 5, 20, size // 2, size, size + 7]
    logits = logits_of(kind, len(counts), size)
    for seed in range(3):
        target_ids = np.random.default_rng(seed).integers(0, size, len(counts)).tolist()
        check(scored(path, logits, target_ids, counts), logits, target_ids, counts)


@over_paths
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_vocabulary(path: CpuPath, kind: str) -> None:
    """Where 151,936 masses are added up they are as near, the likeliest token's logprob as well as others'."""
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
    """Where nearly everything is tied, masked, denormal or huge: ids ascend among equals, both zeros are one."""
    row[data.draw(st.integers(0, len(row) - 1))] = 2.0  # something finite
    logits = np.array([row], np.float32)
    target_ids, num_top = [data.draw(st.integers(0, len(row) - 1))], [data.draw(st.integers(0, len(row) + 1))]
    check(scored(path, logits, target_ids, num_top), logits, target_ids, num_top)


@over_paths
def test_row_does_not_depend_on_others(path: CpuPath) -> None:
    """The same bits by itself and among any rows, in any order, on any threads, whatever lies between them."""
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


@over_paths
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 7, 70, 255, 256, 263])
def test_nan_or_infinite_logits(path: CpuPath, bad: float, place: int) -> None:
    """Raise as the oracle does, wherever in a row they stand, and name the first such row's token."""
    logits = np.zeros((4, 264), np.float32)
    logits[[1, 3], place] = bad
    said = []
    for say in (
        lambda: scored(path, logits, [5, 6, 7, 8], [2] * 4),
        lambda: oracle(torch.from_numpy(logits), [5, 6, 7, 8], [2] * 4),
    ):
        with pytest.raises(ArithmeticError) as raised:
            say()
        said.append(str(raised.value))
    assert said == ["cannot score token 6: its logits hold NaN or have no finite maximum"] * 2
    good = scored(path, logits, [5, 7], [2, 2], rows=[0, 2])
    assert good.top_ids == [[0, 1], [0, 1]]


@over_paths
@pytest.mark.parametrize("size", [1, 8, 300])
def test_all_logits_minus_infinity(path: CpuPath, size: int) -> None:
    """A row of nothing but minus infinity has no logprobs; one token that is possible is certain."""
    logits = np.full((1, size), -np.inf, np.float32)
    with pytest.raises(ArithmeticError, match="token 0:"):
        scored(path, logits, [0], [0])
    logits[0, size - 1] = -3
    assert scored(path, logits, [size - 1], [1]) == Scores([size - 1], [0.0], [1], [[size - 1]], [[0.0]])
    if size > 1:
        assert scored(path, logits, [0], [0]) == Scores([0], [-math.inf], [2], [[]], [[]])


@over_paths
def test_out_of_range_tokens_and_rows(path: CpuPath) -> None:
    """No rows have no scores; a token or a row beyond the last is refused, not read."""
    logits = np.zeros((2, 40), np.float32)
    assert scored(path, logits, [], [], rows=[]) == Scores.empty()
    assert scored(path, logits[:0], [], []) == Scores.empty()
    for target_id in (-1, 40):
        with pytest.raises(IndexError, match="target_id"):
            scored(path, logits, [3, target_id], [0, 0])
    for row in (-1, 2):
        with pytest.raises(IndexError, match="row"):
            scored(path, logits, [3], [0], rows=[row])
