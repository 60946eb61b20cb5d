"""One matrix product by the kernels, for the tests of each instruction set."""

from __future__ import annotations

import torch

from bench.cpu_products import one_linear
from quipu.kernels.cpu.build import Kernels
from quipu.kernels.cpu.packing import Packed


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product_of(
    kernels: Kernels,
    x_NI: torch.Tensor,
    matrix: Packed,
    *,
    bias_O: torch.Tensor | None,
    z_NO: torch.Tensor | None,
    num_threads: int,
) -> torch.Tensor:
    """Return the product, computed in the first columns of wider rows of NaN; the other columns must stay NaN."""
    y_NO = torch.full((len(x_NI), matrix.rows + 40), float("nan"))
    one_linear(kernels.library, x_NI, matrix, y_NO, bias_O=bias_O, z_NO=z_NO, num_threads=num_threads)()
    assert y_NO[:, matrix.rows :].isnan().all(), "wrote beyond its columns"
    return y_NO[:, : matrix.rows]
