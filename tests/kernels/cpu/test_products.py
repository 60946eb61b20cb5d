"""The matrix product of each instruction set alone: correct, and a row's bits do not depend on the other rows.

Sizes include depths and numbers of columns that no vector length divides, and rows of several pieces of work. Memory
after the columns is NaN and must stay so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bench.cpu_products import one_linear
from quipu.kernels.cpu.build import Kernels
from quipu.kernels.cpu.packing import pack
from tests.kernels.cpu.cpu_paths import PATHS, CpuPath, kernels_of, why_not_native
from tests.kernels.cpu.one_product import product_of, random

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it

Floats = npt.NDArray[np.float32]

DEPTHS = [(1, 40), (7, 16), (64, 33), (100, 96), (512, 31), (1100, 150)]
"""Pairs of depth (terms per sum) and number of columns."""


def multiply(
    kernels: Kernels,
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    *,
    bias_O: torch.Tensor | None = None,
    z_NO: torch.Tensor | None = None,
    num_threads: int = 1,
) -> torch.Tensor:
    matrix = pack(weight_OI, kernels.library)
    return product_of(kernels, x_NI, matrix, bias_O=bias_O, z_NO=z_NO, num_threads=num_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("depth", "columns"), DEPTHS)
def test_product(kernels: Kernels, path: CpuPath, depth: int, columns: int, dtype: torch.dtype) -> None:
    """Compute x @ weight.T + bias + z up to float32 rounding, with x as the instruction set rounds it."""
    x_NI, weight_OI = random(37, depth, seed=1), random(columns, depth, seed=2).to(dtype)
    bias_O, z_NO = random(columns, seed=3), random(37, columns, seed=4)
    rounded_NI = x_NI.bfloat16() if path.rounds_activations and dtype == torch.bfloat16 else x_NI
    exact_NO = rounded_NI.double() @ weight_OI.double().T
    scale_NO = rounded_NI.double().abs() @ weight_OI.double().abs().T + 1
    found = multiply(kernels, x_NI, weight_OI)
    assert ((found - exact_NO).abs() / scale_NO).max() < 1e-6
    found = multiply(kernels, x_NI, weight_OI, bias_O=bias_O, z_NO=z_NO)
    assert ((found - (exact_NO + bias_O + z_NO)).abs() / (scale_NO + 1)).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("depth", "columns"), DEPTHS)
def test_row_does_not_depend_on_others(kernels: Kernels, depth: int, columns: int, dtype: torch.dtype) -> None:
    """Compute the same bits for a row alone, among any number of rows, at any index, and on any threads."""
    x_NI, weight_OI = random(150, depth, seed=5), random(columns, depth, seed=6).to(dtype)
    bias_O = random(columns, seed=7)
    alone_NO = torch.cat([multiply(kernels, x_NI[n : n + 1], weight_OI, bias_O=bias_O) for n in range(20)])
    whole_NO = multiply(kernels, x_NI, weight_OI, bias_O=bias_O)
    assert torch.equal(whole_NO[:20], alone_NO)
    for start, count, num_threads in [
        (3, 2, 1), (1, 3, 2), (5, 4, 1), (2, 5, 1), (0, 6, 3), (4, 7, 1), (9, 8, 1), (0, 9, 2), (4, 15, 1), (1, 16, 3),
        (2, 17, 1), (0, 18, 2), (1, 31, 1), (2, 32, 1), (3, 33, 2), (5, 48, 1), (6, 65, 1), (0, 128, 3), (10, 129, 2),
    ]:  # fmt: skip
        part = slice(start, start + count)
        found = multiply(kernels, x_NI[part], weight_OI, bias_O=bias_O, num_threads=num_threads)
        assert torch.equal(found, whole_NO[part]), (start, count, num_threads)


def test_result_beyond_the_caches(kernels: Kernels) -> None:
    """Compute the same bits where a result is so large that it is stored past the caches."""
    x_NI, matrix = random(2080, 40, seed=10), pack(random(1024, 40, seed=11).bfloat16(), kernels.library)
    z_NO, bias_O = random(2080, 1024, seed=12), random(1024, seed=13)

    def product(part: slice) -> torch.Tensor:
        y_NO = torch.full((len(x_NI[part]), 1024), float("nan"))
        one_linear(kernels.library, x_NI[part], matrix, y_NO, bias_O=bias_O, z_NO=z_NO[part], num_threads=2)()
        return y_NO

    parts = [product(slice(first, first + 520)) for first in range(0, 2080, 520)]
    assert torch.equal(product(slice(0, 2080)), torch.cat(parts))


def test_nan_row_does_not_affect_others(kernels: Kernels) -> None:
    """Compute the other rows unchanged if a row holds NaN or infinity."""
    x_NI, weight_OI = random(40, 64, seed=8), random(48, 64, seed=9).bfloat16()
    before_NO = multiply(kernels, x_NI, weight_OI)
    x_NI[7], x_NI[20] = float("nan"), float("inf")
    after_NO = multiply(kernels, x_NI, weight_OI)
    others = [n for n in range(40) if n not in (7, 20)]
    assert torch.equal(after_NO[others], before_NO[others])
    assert not after_NO[[7, 20]].isfinite().any()


def fused(a: Floats, b: Floats, total: Floats) -> Floats:
    """Return a * b + total, rounded once: in float64 the product of two bfloat16 is exact, and here the sum as well."""
    exact = np.multiply.outer(a.astype(np.float64), b.astype(np.float64)) + total
    return exact.astype(np.float32)


def pair_by_pair(left: Floats, right: Floats) -> Floats:
    """Sum as VDPBF16PS does: of each pair the odd product, then the even one."""
    total = np.zeros((len(left), len(right)), np.float32)
    for k in range(0, left.shape[1], 2):
        for one in (k + 1, k):
            total = fused(left[:, one], right[:, one], total)
    return total


def tile_by_tile(left: Floats, right: Floats) -> Floats:
    """Sum as TDPBF16PS does: add the sums of 16 pairs' even and odd products to each other, then to the total."""
    total = np.zeros((len(left), len(right)), np.float32)
    for start in range(0, left.shape[1], 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(start, start + 32, 2):
            even = fused(left[:, k], right[:, k], even)
            odd = fused(left[:, k + 1], right[:, k + 1], odd)
        total = total + (even + odd)
    return total


@pytest.mark.parametrize(("depth", "columns"), DEPTHS)
@pytest.mark.parametrize(("name", "sum_up"), [("avx512_bf16", pair_by_pair), ("amx_bf16", tile_by_tile)])
def test_bits_match_the_manual(name: str, sum_up: Callable[[Floats, Floats], Floats], depth: int, columns: int) -> None:
    """Match Intel's description of the bfloat16 instructions bit for bit, wherever k is split.

    Always emulated: a processor may round differently, which is correct as long as it is invariant.
    """
    x_NI, weight_OI = random(35, depth, seed=10), random(columns, depth, seed=11).bfloat16()
    found = multiply(kernels_of(CpuPath(name, True)), x_NI, weight_OI)
    left, right = (
        np.pad(matrix.bfloat16().float().numpy(), ((0, 0), (0, -depth % 32))) for matrix in (x_NI, weight_OI)
    )
    assert np.array_equal(found.numpy(), sum_up(left, right))


def test_denormals_count_as_zero(kernels: Kernels, path: CpuPath) -> None:
    """The bfloat16 instructions treat denormals as 0, the others do not, whatever the process's floating-point mode."""
    tiny, weight_OI = torch.full((1, 32), 2.0**-130), torch.full((32, 32), 2.0**4).bfloat16()
    expected = 0.0 if path.rounds_activations else 32 * 2.0**-126
    assert (multiply(kernels, tiny, weight_OI) == expected).all()


def test_tiles_are_released() -> None:
    """Release tiles after a product: the system would otherwise save and restore them at every context switch."""
    kernels = kernels_of(CpuPath("amx_bf16", True))  # a real processor cannot be asked
    held = kernels.library.emulated_tiles_held
    held.restype = ctypes.c_int32
    for rows in (1, 40):
        multiply(kernels, random(rows, 64, seed=12), random(48, 64, seed=13).bfloat16())
        assert held() == 0


@pytest.mark.parametrize("name", [path.name for path in PATHS if path.name != "avx2"])
def test_native_instructions_were_tested(name: str) -> None:
    """If the processor has an instruction set, it was tested natively, and the emulation agrees."""
    reason = why_not_native(name)
    if reason:
        pytest.skip(f"{name} was only tested emulated: {reason}")
    x_NI, weight_OI = random(37, 1100, seed=14), random(150, 1100, seed=15).bfloat16()
    native, emulated = (multiply(kernels_of(CpuPath(name, how)), x_NI, weight_OI) for how in (False, True))
    assert (native - emulated).abs().max() / emulated.std() < (0 if name == "avx512" else 1e-5) + 1e-9
