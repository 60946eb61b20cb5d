"""Matrix products: by cuBLAS, or by our own kernel where results must not depend on the number of rows."""

from __future__ import annotations

from typing import Protocol

import torch

import triton

from .configs import Tiles
from .linear import add_slices_kernel, linear_kernel, slices_kernel


class Linear(Protocol):
    """`x @ weight.T + bias`, stored as `dtype`."""

    @property
    def name(self) -> str: ...

    def __call__(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor: ...


class LibraryLinear:
    """torch's product, which is cuBLAS on a GPU."""

    name = "cublas"

    def __call__(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if dtype == x_NI.dtype:
            return torch.nn.functional.linear(x_NI, weight_OI, bias_O)
        # The head's logits are float32: many half-precision ones would be tied.
        y_NO = torch.mm(x_NI, weight_OI.t(), out_dtype=dtype)
        return y_NO if bias_O is None else y_NO + bias_O


class OwnLinear:
    """The kernels of `linear.py`, all in one tile shape."""

    name = "own"

    def __init__(self, tiles: Tiles) -> None:
        self._tiles = tiles

    def __call__(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        t = self._tiles
        (num_rows, num_in), num_out = x_NI.shape, weight_OI.shape[0]
        y_NO = x_NI.new_empty((num_rows, num_out), dtype=dtype)
        biased = bias_O is not None
        bias = bias_O if bias_O is not None else weight_OI
        row_tiles, column_tiles = triton.cdiv(num_rows, t.linear.rows), triton.cdiv(num_out, t.columns)
        shape = (num_in, num_out)
        tile = (t.linear.rows, t.columns, t.depth, t.slice)
        options = {
            "num_warps": t.linear.num_warps,
            "num_stages": t.linear.num_stages,
            "enable_fp_fusion": t.fusion,
        }
        if num_rows > t.few_rows:
            linear_kernel[(row_tiles, column_tiles)](
                x_NI, weight_OI, bias, y_NO, num_rows, x_NI.stride(0), *shape, biased, *tile, **options
            )
            return y_NO
        slices = triton.cdiv(num_in, t.slice)
        parts_SNO = x_NI.new_empty((slices, num_rows, num_out), dtype=torch.float32)
        slices_kernel[(column_tiles, row_tiles, slices)](
            x_NI, weight_OI, parts_SNO, num_rows, x_NI.stride(0), *shape, *tile, **options
        )
        block = min(1024, triton.next_power_of_2(num_out))
        add_slices_kernel[(num_rows, triton.cdiv(num_out, block))](
            parts_SNO, bias, y_NO, num_rows, num_out, slices, biased, block, enable_fp_fusion=t.fusion
        )
        return y_NO
