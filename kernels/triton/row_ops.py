"""The part of `Ops` that works on single rows, and defers nothing: each call is a launch. `ops.py` has the rest.

What must always hold: no kernel reads a tensor that is still deferred.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

import triton

from . import activation, mixed_copies
from .configs import Tiles
from .launch_shapes import block_of, dense_like, rows_of, warps_for


class RowOps(ABC):
    """Implements a part of `quipu.kernels.ops.Ops` over tensors on the device."""

    _tiles: Tiles

    @abstractmethod
    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same tensor, computed if it was deferred."""

    def layer_norm(
        self, x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        x_ND, out_ND = self._computed(x_ND), dense_like(x_ND)
        num_rows, width = x_ND.shape
        block = triton.next_power_of_2(width)
        activation.layer_norm_kernel[(num_rows,)](
            x_ND, weight_D, weight_D if bias_D is None else bias_D, out_ND, eps, bias_D is not None, width, block,
            num_warps=warps_for(block), enable_fp_fusion=self._tiles.fusion,
        )  # fmt: skip
        return out_ND

    def silu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return self._gated(gate_up_N2F, activation.gated_kernel, False)

    def gelu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return self._gated(gate_up_N2F, activation.gated_kernel, True)

    def gelu(self, x_NF: torch.Tensor) -> torch.Tensor:
        x_NF, out_NF = self._computed(x_NF), dense_like(x_NF)
        num_rows, width = x_NF.shape
        activation.gelu_kernel[rows_of(num_rows, width)](x_NF, out_NF, width, block_of(width))
        return out_NF

    def sigmoid_mul(self, x_ND: torch.Tensor, score_N1: torch.Tensor) -> torch.Tensor:
        x_ND, score_N1 = self._computed(x_ND), self._computed(score_N1)
        num_rows, width = x_ND.shape
        out_ND = dense_like(x_ND)
        activation.sigmoid_mul_kernel[rows_of(num_rows, width)](x_ND, score_N1, out_ND, width, block_of(width))
        return out_ND

    def mul(self, x_NF: torch.Tensor, y_NF: torch.Tensor) -> torch.Tensor:
        return self._mul(x_NF, self._computed(y_NF), y_NF.stride(0), is_one=False)

    def scale(self, x_ND: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self._mul(x_ND, factor, 0, is_one=len(factor) == 1)

    def sparse_gelu_mul(self, gate_up_N2F: torch.Tensor, deviations: float) -> torch.Tensor:
        gate_up_N2F = self._computed(gate_up_N2F)
        num_rows, width = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
        block = triton.next_power_of_2(width)
        h_NF = gate_up_N2F.new_empty((num_rows, width))
        activation.sparse_gelu_mul_kernel[(num_rows,)](
            gate_up_N2F, h_NF, gate_up_N2F.stride(0), deviations, width, block, num_warps=warps_for(block),
            enable_fp_fusion=self._tiles.fusion,
        )  # fmt: skip
        return h_NF

    def match_copies(self, x_ND: torch.Tensor, y_NCD: torch.Tensor, floor: float) -> torch.Tensor:
        x_ND, y_NCD = self._computed(x_ND), self._computed(y_NCD)
        num_rows, copies, width = y_NCD.shape
        block = triton.next_power_of_2(width)
        z_NCD = y_NCD.new_empty((num_rows, 1 + copies, width))
        mixed_copies.match_copies_kernel[(num_rows,)](
            x_ND, y_NCD, z_NCD, x_ND.stride(0), y_NCD.stride(0), floor, copies, width, block,
            num_warps=warps_for(block), enable_fp_fusion=self._tiles.fusion,
        )  # fmt: skip
        return z_NCD

    def mix_copies(self, x_NCD: torch.Tensor, weights: torch.Tensor, z_NJD: torch.Tensor) -> torch.Tensor:
        x_NCD, z_NJD, weights = self._computed(x_NCD), self._computed(z_NJD), self._computed(weights)
        num_rows, copies, width = x_NCD.shape
        y_NCD = dense_like(x_NCD)
        mixed_copies.mix_copies_kernel[rows_of(num_rows, width)](
            x_NCD, weights, z_NJD, y_NCD, x_NCD.stride(0), 0 if weights.dim() == 2 else weights.stride(0),
            z_NJD.stride(0), copies, z_NJD.shape[1], width, block_of(width), enable_fp_fusion=self._tiles.fusion,
        )  # fmt: skip
        return y_NCD

    def soft_cap(self, x_NV: torch.Tensor, cap: float) -> torch.Tensor:
        x_NV = self._computed(x_NV)
        num_rows, width = x_NV.shape
        out_NV = dense_like(x_NV)
        activation.soft_cap_kernel[rows_of(num_rows, width)](x_NV, out_NV, cap, width, block_of(width))
        return out_NV

    def _gated(self, gate_up_N2F: torch.Tensor, kernel: Any, *numbers: float) -> torch.Tensor:
        gate_up_N2F = self._computed(gate_up_N2F)
        num_rows, width = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
        h_NF = gate_up_N2F.new_empty((num_rows, width))
        grid, stride = rows_of(num_rows, width), gate_up_N2F.stride(0)
        kernel[grid](gate_up_N2F, h_NF, stride, *numbers, width, block_of(width))
        return h_NF

    def _mul(self, x_ND: torch.Tensor, y: torch.Tensor, stride: int, *, is_one: bool) -> torch.Tensor:
        x_ND = self._computed(x_ND).contiguous()
        num_rows, width = x_ND.shape
        out_ND = dense_like(x_ND)
        activation.mul_kernel[rows_of(num_rows, width)](x_ND, y, out_ND, stride, is_one, width, block_of(width))
        return out_ND
