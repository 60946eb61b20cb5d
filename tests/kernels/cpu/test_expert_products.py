"""The product of experts is that of a single matrix, bit for bit, whatever the format of their weights.

So experts in bfloat16 use the bfloat16 instructions where there are any, and quantized ones are multiplied as such.
"""

from __future__ import annotations

import pytest
import torch

from bench.cpu_products import one_linear
from quipu.kernels.checkpoints.quantized import QuantizedLayout, quantize
from quipu.kernels.cpu import program
from quipu.kernels.cpu.build import Kernels
from quipu.kernels.cpu.packing import Packed, pack
from quipu.kernels.cpu.program import Bounds, Op, Pass
from quipu.kernels.cpu.quantized_packing import pack_quantized
from tests.kernels.cpu.cpu_paths import PATHS, CpuPath, kernels_of
from tests.kernels.step_batches import make_batch

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it

WIDTH, COLUMNS = 64, 40
STARTS = [0, 3, 3, 40]
"""First sorted row of each of three experts, one of which has no rows, and the end of the last."""


def matrix_in(kernels: Kernels, numbers: str, seed: int) -> Packed:
    weight_OI = torch.randn(COLUMNS, WIDTH, generator=torch.Generator().manual_seed(seed))
    if numbers in ("float32", "bfloat16"):
        return pack(weight_OI.to(getattr(torch, numbers)), kernels.library)
    bits = 8 if numbers.startswith("int8") else 4
    rows = quantize(weight_OI, QuantizedLayout(bits, 32, has_offsets=False))
    return pack_quantized(rows, bits, kernels.library, byte_products=numbers.endswith("-bytes"))


def multiply_experts(kernels: Kernels, x_NI: torch.Tensor, matrices: list[Packed], num_threads: int) -> torch.Tensor:
    """Return the products of sorted rows with the matrices of their experts."""
    num_experts, num_rows = len(matrices), len(x_NI)
    y_NO = torch.full((num_rows, COLUMNS), float("nan"))
    dispatch = torch.zeros(9 * num_experts + 1 + num_rows, dtype=torch.int64)
    dispatch[8 * num_experts : 9 * num_experts + 1] = torch.tensor(STARTS)
    addresses = torch.tensor([matrix.address for matrix in matrices])
    op = Op(
        kind=program.EXPERT_LINEAR,
        stored=matrices[0].stored,
        width=WIDTH,
        out_width=COLUMNS,
        num_experts=num_experts,
        num_chosen=1,
        x_stride=WIDTH,
        y_stride=COLUMNS,
        x=x_NI.data_ptr(),
        y=y_NO.data_ptr(),
        matrices=addresses.data_ptr(),
        dispatch=dispatch.data_ptr(),
    )
    batch = make_batch({"token_ids": [0] * num_rows, "position": 0, "blocks": [1, 2, 3]})
    bounds = Bounds(num_tokens=num_rows, num_logits=1, num_blocks=4, num_positions=num_rows, vocab_size=1)
    Pass(batch, [None], bounds=bounds, block_size=16, num_threads=num_threads).run(kernels.library, (Op * 1)(op), [])
    return y_NO


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8", "int4", "int8-bytes", "int4-bytes"])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_each_expert_is_a_product(path: CpuPath, numbers: str) -> None:
    """Each expert's rows have the bits of the same rows multiplied with its matrix alone."""
    kernels = kernels_of(path)
    matrices = [matrix_in(kernels, numbers, seed) for seed in range(3)]
    x_NI = torch.randn(STARTS[-1], WIDTH, generator=torch.Generator().manual_seed(9))
    for num_threads in (1, 2):
        found = multiply_experts(kernels, x_NI, matrices, num_threads)
        for matrix, start, end in zip(matrices, STARTS, STARTS[1:], strict=False):
            if start == end:
                continue
            alone = torch.empty(end - start, COLUMNS)
            one_linear(kernels.library, x_NI[start:end], matrix, alone, num_threads=1)()
            assert torch.equal(found[start:end], alone)
