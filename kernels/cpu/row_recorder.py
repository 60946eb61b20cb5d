"""Records the operations of single rows, other than products: norms, activations, sums.

What must always hold: each is in `program.ROW_WISE`.
"""

from __future__ import annotations

from typing import Any

import torch

from . import program
from .call_recorder import CallRecorder


class RowRecorder(CallRecorder):
    """Implements a part of `quipu.kernels.ops.Ops` without computing anything."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._record(
            program.RMS_NORM,
            x=x,
            shape=tuple(x.shape[1:]),
            width=x.shape[-1],
            num_heads=x[0].numel() // x.shape[-1],
            weight=self._vector(weight),
            eps=eps,
        )

    def layer_norm(
        self, x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        width, bias = x_ND.shape[1], None if bias_D is None else self._vector(bias_D)
        vectors: dict[str, Any] = {"weight": self._vector(weight_D), "bias": bias}
        return self._record(program.LAYER_NORM, x=x_ND, shape=(width,), width=width, eps=eps, **vectors)

    def norm_latent(self, x_NI: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width, vector = x_NI.shape[1], self._vector(weight)
        return self._record(
            program.NORM_LATENT, x=x_NI, shape=(width,), width=width, out_width=len(weight), weight=vector, eps=eps
        )

    def silu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return self._gated(program.SILU_MUL, gate_up_N2F)

    def gelu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return self._gated(program.GELU_MUL, gate_up_N2F)

    def sparse_gelu_mul(self, gate_up_N2F: torch.Tensor, deviations: float) -> torch.Tensor:
        return self._gated(program.SPARSE_GELU_MUL, gate_up_N2F, scale=deviations)

    def gelu(self, x_NF: torch.Tensor) -> torch.Tensor:
        return self._record(program.GELU, x=x_NF, shape=(x_NF.shape[1],), width=x_NF.shape[1])

    def sigmoid_mul(self, x_ND: torch.Tensor, score_N1: torch.Tensor) -> torch.Tensor:
        return self._record(program.SIGMOID_MUL, x=x_ND, z=score_N1, shape=(x_ND.shape[1],), width=x_ND.shape[1])

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        return self._record(program.ADD, x=x_ND, z=y_ND, shape=(x_ND.shape[1],), width=x_ND.shape[1])

    def mul(self, x_NF: torch.Tensor, y_NF: torch.Tensor) -> torch.Tensor:
        return self._record(program.MUL, x=x_NF, z=y_NF, shape=(x_NF.shape[1],), width=x_NF.shape[1])

    def scale(self, x_ND: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        width, factors = x_ND.shape[1], self._vector(factor)
        return self._record(program.MUL, x=x_ND, shape=(width,), width=width, weight=factors, out_width=len(factor))

    def match_copies(self, x_ND: torch.Tensor, y_NCD: torch.Tensor, floor: float) -> torch.Tensor:
        _, copies, width = y_NCD.shape
        fields: dict[str, Any] = {"width": width, "num_heads": copies, "eps": floor}
        return self._record(program.MATCH_COPIES, x=x_ND, z=y_NCD, shape=(1 + copies, width), **fields)

    def mix_copies(self, x_NCD: torch.Tensor, weights: torch.Tensor, z_NJD: torch.Tensor) -> torch.Tensor:
        _, copies, width = x_NCD.shape
        fields: dict[str, Any] = {"width": width, "num_heads": copies, "num_multiplied": z_NJD.shape[1]}
        if weights.dim() == 2:
            vector = self._vector(weights)
            return self._record(program.MIX_COPIES, x=x_NCD, z=z_NJD, shape=(copies, width), weight=vector, **fields)
        fields["narrow_stride"] = weights.stride(0)
        return self._record(program.MIX_COPIES, x=x_NCD, z=z_NJD, v=weights, shape=(copies, width), **fields)

    def soft_cap(self, x_NV: torch.Tensor, cap: float) -> torch.Tensor:
        return self._record(program.SOFT_CAP, x=x_NV, shape=(x_NV.shape[1],), width=x_NV.shape[1], soft_cap=cap)

    def _gated(self, kind: int, gate_up_N2F: torch.Tensor, **fields: Any) -> torch.Tensor:
        width = gate_up_N2F.shape[1] // 2
        return self._record(kind, x=gate_up_N2F, shape=(width,), width=width, **fields)
