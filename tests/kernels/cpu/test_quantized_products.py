"""Products with quantized matrices in each instruction set: correct, and a row's bits do not depend on the other rows.

The counterpart of `test_products.py`. Sizes include depths and numbers of columns that no vector length divides, groups
of every size, offsets, and rows of several pieces of work.
"""

from __future__ import annotations

import ctypes

import attrs
import pytest
import torch

from quipu.kernels.checkpoints.quantized import QuantizedLayout, QuantizedRows, quantize
from quipu.kernels.cpu.build import Kernels
from quipu.kernels.cpu.quantized_packing import kernel_layout, pack_quantized
from tests.kernels.cpu.cpu_paths import PATHS, CpuPath, kernels_of, why_not_native
from tests.kernels.cpu.one_product import product_of, random

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it


@attrs.frozen
class Case:
    """A quantized matrix, and how activations are multiplied with it."""

    bits: int
    width: int
    columns: int
    group_size: int
    has_offsets: bool = False
    byte_products: bool = False
    is_e2m1: bool = False

    def __str__(self) -> str:
        kind = f"{self.bits} bits, {self.columns} x {self.width}, groups of {self.group_size}"
        return kind + ", offsets" * self.has_offsets + ", bytes" * self.byte_products + ", e2m1" * self.is_e2m1

    def rows(self) -> QuantizedRows:
        weight_OI = random(self.columns, self.width, seed=2)
        rows = quantize(weight_OI, QuantizedLayout(self.bits, self.group_size, has_offsets=False))
        if self.is_e2m1:
            rows = attrs.evolve(rows, codes_OI=rows.codes_OI & 15, is_e2m1=True)
            rows.codes_OI[0, :16] = torch.arange(16)
        if not self.has_offsets:
            return rows
        draw = torch.Generator().manual_seed(3)
        rows.codes_OI[self.columns // 2, 5] = -(2 ** (self.bits - 1))  # the lowest code
        zeros_OG = torch.randint(-7, 8, rows.scales_OG.shape, generator=draw, dtype=torch.int8)
        return attrs.evolve(rows, zeros_OG=zeros_OG, offsets_OG=torch.randn(zeros_OG.shape, generator=draw))


SHAPES = [
    (64, 33, 64, False),
    (768, 50, 768, False),
    (100, 40, 100, True),
    (512, 96, 16, True),
    (1024, 70, 32, False),
    (384, 150, 128, False),
]
CASES = [Case(bits, *shape, bytes_) for bits in (8, 4) for shape in SHAPES for bytes_ in (False, True)]
CASES += [Case(4, 1024, 70, 32, is_e2m1=True), Case(4, 96, 33, 32, is_e2m1=True)]


def multiply(
    kernels: Kernels,
    x_NI: torch.Tensor,
    case: Case,
    *,
    bias_O: torch.Tensor | None = None,
    z_NO: torch.Tensor | None = None,
    num_threads: int = 1,
) -> torch.Tensor:
    matrix = pack_quantized(case.rows(), case.bits, kernels.library, byte_products=case.byte_products)
    return product_of(kernels, x_NI, matrix, bias_O=bias_O, z_NO=z_NO, num_threads=num_threads)


def as_multiplied(path: CpuPath, x_NI: torch.Tensor, case: Case) -> torch.Tensor:
    """Return activations as they are rounded before the product."""
    if case.byte_products:
        layout = QuantizedLayout(case.bits, case.group_size, case.has_offsets)
        size = kernel_layout(layout, case.width, byte_products=True).group_size
        x_NGI = x_NI.reshape(len(x_NI), -1, size)
        most_NG1 = x_NGI.abs().amax(2, keepdim=True)
        return ((x_NGI * (127 / most_NG1)).round() * (most_NG1 / 127)).flatten(1)
    return x_NI.bfloat16() if path.rounds_activations else x_NI


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(kernels: Kernels, path: CpuPath, case: Case) -> None:
    """Compute x @ weight.T + bias + z with the dequantized weight, up to float32 rounding."""
    x_NI, bias_O, z_NO = random(37, case.width, seed=1), random(case.columns, seed=4), random(37, case.columns, seed=5)
    weight_OI = case.rows().dequantized().double()
    rounded_NI = as_multiplied(path, x_NI, case).double()
    exact_NO = rounded_NI @ weight_OI.T
    scale_NO = rounded_NI.abs() @ weight_OI.abs().T + 1
    assert ((multiply(kernels, x_NI, case) - exact_NO).abs() / scale_NO).max() < 2e-6
    found = multiply(kernels, x_NI, case, bias_O=bias_O, z_NO=z_NO)
    assert ((found - (exact_NO + bias_O + z_NO)).abs() / (scale_NO + 1)).max() < 2e-6


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_does_not_depend_on_others(kernels: Kernels, case: Case) -> None:
    """Compute the same bits for a row alone, among any number of rows, at any index, and on any threads."""
    x_NI, bias_O = random(150, case.width, seed=6), random(case.columns, seed=7)
    whole_NO = multiply(kernels, x_NI, case, bias_O=bias_O)
    for start, count, num_threads in [
        (0, 1, 1), (7, 1, 2), (3, 2, 1), (1, 3, 2), (5, 4, 1), (2, 5, 1), (0, 6, 3), (4, 7, 1), (9, 8, 1), (0, 9, 2),
        (1, 16, 3), (2, 17, 1), (3, 33, 2), (10, 129, 2),
    ]:  # fmt: skip
        part = slice(start, start + count)
        found = multiply(kernels, x_NI[part], case, bias_O=bias_O, num_threads=num_threads)
        assert torch.equal(found, whole_NO[part]), (start, count, num_threads)


@pytest.mark.parametrize("byte_products", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_nan_row_does_not_affect_others(kernels: Kernels, bits: int, byte_products: bool) -> None:
    """Compute the other rows unchanged if a row holds NaN or infinity, and nothing finite for that row."""
    case = Case(bits, 64, 48, 32, byte_products=byte_products)
    x_NI = random(40, 64, seed=8)
    before_NO = multiply(kernels, x_NI, case)
    x_NI[7, 3], x_NI[20, 60] = float("nan"), float("inf")
    after_NO = multiply(kernels, x_NI, case)
    others = [n for n in range(40) if n not in (7, 20)]
    assert torch.equal(after_NO[others], before_NO[others])
    assert not after_NO[[7, 20]].isfinite().any()


def test_row_of_zeros(kernels: Kernels) -> None:
    """A row of zeros gives zeros, although it has no largest magnitude to scale by."""
    for byte_products in (False, True):
        assert (multiply(kernels, torch.zeros(1, 64), Case(8, 64, 48, 32, byte_products=byte_products)) == 0).all()


def test_bytes_have_the_same_bits_everywhere() -> None:
    """Sums of 8-bit products are exact, so every instruction set computes the same bits."""
    for case in (Case(8, 512, 40, 32, byte_products=True), Case(4, 512, 40, 128, True, byte_products=True)):
        x_NI = random(37, 512, seed=9)
        found = [multiply(kernels_of(path), x_NI, case) for path in PATHS]
        assert all(torch.equal(one, found[0]) for one in found)


def test_tiles_are_released() -> None:
    """Release tiles after a product: the system would otherwise save and restore them at every context switch."""
    kernels = kernels_of(CpuPath("amx_bf16", True))  # a real processor cannot be asked
    held = kernels.library.emulated_tiles_held
    held.restype = ctypes.c_int32
    for rows in (1, 40):
        for byte_products in (False, True):
            multiply(kernels, random(rows, 64, seed=10), Case(8, 64, 48, 64, byte_products=byte_products))
            assert held() == 0


@pytest.mark.parametrize("name", [path.name for path in PATHS if path.name not in ("avx2", "amx_bf16")])
def test_emulation_agrees(name: str) -> None:
    """If the processor has an instruction set, its own instructions give what the emulation gives."""
    if why_not_native(name):
        pytest.skip(f"{name} was only tested emulated: {why_not_native(name)}")
    for case in (Case(8, 512, 150, 32, True), Case(4, 512, 150, 32)):
        x_NI = random(37, 512, seed=11)
        native, emulated = (multiply(kernels_of(CpuPath(name, how)), x_NI, case) for how in (False, True))
        assert (native - emulated).abs().max() / emulated.std() < 1e-5


@pytest.mark.parametrize(
    ("group_size", "width", "held", "held_for_bytes"),
    [
        (32, 64, 32, 32), (512, 1024, 256, 256), (48, 96, 16, 16),
        (96, 96, 96, 96), (1536, 1536, 1536, 512), (896, 896, 896, 128),
    ],
)  # fmt: skip
def test_groups_that_kernels_support(group_size: int, width: int, held: int, held_for_bytes: int) -> None:
    """Hold groups that no kernel has as smaller ones with equal scales; for products of bytes, whole rows as well."""
    layout = QuantizedLayout(8, group_size, False)
    assert kernel_layout(layout, width, byte_products=False).group_size == held
    assert kernel_layout(layout, width, byte_products=True).group_size == held_for_bytes


@pytest.mark.parametrize(("group_size", "width"), [(8, 64), (24, 48), (32, 48)])
def test_other_groups_are_refused(group_size: int, width: int) -> None:
    """Refuse groups too small for any kernel, and those that do not divide a row, with both numbers."""
    with pytest.raises(ValueError, match=f"groups of {group_size} in rows of {width}"):
        kernel_layout(QuantizedLayout(8, group_size, False), width, byte_products=False)
