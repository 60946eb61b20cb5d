"""The operations of the reference, in plain torch: always the same bits, even where that is slow.

Functions whose results could depend on neighbouring rows say how they avoid it; additions, multiplications and roots
are exactly rounded by IEEE 754 and need no care.

Weights and activations are float32: weights are widened from the checkpoint's dtype once, at load, and only the KV
cache is kept in it, or in the dtype that the operator chose. So every dtype uses the same code path of the matrix
library on every CPU.

What must always hold: row n of a result is a function of row n alone (in `attend`: and of its sequence's KV).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kv_cache import KVCache
from ..ops import Experts, RopeTable
from .attention import Scores, attend_span
from .experts import mix_experts
from .kv_slots import slots_of
from .plan import StepPlan
from .rows import gelu, gelu_mul, multiply, row_by_row, silu_mul, sparse_gelu_mul


class ReferenceOps:
    """Implements `quipu.kernels.ops.Ops` for one pass."""

    def __init__(self, plan: StepPlan, cache: KVCache, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        self._dtype = dtype
        self._plan = plan
        self._cache = cache
        self._cos_sin: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id(table)

    def select(self, tokens: Sequence[int]) -> None:
        """Say which tokens of the pass all later operations work on, row by row. Before that: all of them."""

    def embed(
        self, token_ids_N: torch.Tensor, table_VD: torch.Tensor, scale: float = 1.0, *, is_exact: bool = False
    ) -> torch.Tensor:
        token_ids_N = torch.where(token_ids_N < table_VD.shape[0], token_ids_N, 0)
        # the table is always float32
        return table_VD[token_ids_N] * torch.tensor(scale, dtype=torch.float32 if is_exact else self._dtype).float()

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        y_NO = multiply(x_NI, weight_OI)
        return y_NO if bias_O is None else y_NO + bias_O

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def layer_norm(
        self, x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        x_ND = x_ND - x_ND.mean(-1, keepdim=True)
        y_ND = self.rms_norm(x_ND, weight_D, eps)
        return y_ND if bias_D is None else y_ND + bias_D

    def norm_latent(self, x_NI: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width = len(weight)
        return torch.cat([x_NI[:, width:], self.rms_norm(x_NI[:, :width].contiguous(), weight, eps)], dim=1)

    def linear_heads(self, x_NHE: torch.Tensor, weights_OI: list[torch.Tensor], *, first: int = 0) -> torch.Tensor:
        last = first + weights_OI[0].shape[1]
        heads = zip(x_NHE[..., first:last].unbind(1), weights_OI, strict=True)
        y_NHO = torch.stack([multiply(x_NI.contiguous(), weight_OI) for x_NI, weight_OI in heads], dim=1)
        return torch.cat([x_NHE[..., last:], y_NHO], dim=-1)

    def rope(self, x_NHE: torch.Tensor, table: RopeTable) -> torch.Tensor:
        if id(table) not in self._cos_sin:
            self._cos_sin[id(table)] = table.at(self._plan.positions_N)
        cos_NR, sin_NR = self._cos_sin[id(table)]
        half = cos_NR.shape[1]
        rotating, rest = x_NHE[..., : 2 * half], x_NHE[..., 2 * half :]
        if table.is_interleaved:
            first_NHR, second_NHR = rotating.view(*x_NHE.shape[:2], half, 2).unbind(-1)
        else:
            first_NHR, second_NHR = torch.split(rotating, half, dim=-1)
        cos_N1R, sin_N1R = cos_NR.unsqueeze(1), sin_NR.unsqueeze(1)
        rotated = (first_NHR * cos_N1R - second_NHR * sin_N1R, second_NHR * cos_N1R + first_NHR * sin_N1R)
        if table.is_interleaved:
            return torch.cat([torch.stack(rotated, dim=-1).flatten(-2), rest], dim=-1)
        return torch.cat([*rotated, rest], dim=-1)

    def write_kv(self, layer: int, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> None:
        for slots, new_NKE in zip(slots_of(self._cache, layer), (k_NKE, v_NKE), strict=True):
            slots.write(self._plan.blocks_n, self._plan.offsets_n, new_NKE[: self._plan.blocks_n.shape[0]])

    def attend(
        self,
        layer: int,
        q_NHE: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        in_chunks: bool = False,
        soft_cap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_slots, v_slots = slots_of(self._cache, layer)
        scores = Scores(scale=scale, window=window, in_chunks=in_chunks, soft_cap=soft_cap, sinks_H=sinks_H)
        o_NHE = torch.zeros_like(q_NHE, memory_format=torch.contiguous_format)
        for span in self._plan.spans:
            rows = slice(span.start, span.start + span.length)
            o_NHE[rows] = attend_span(q_NHE[rows], k_slots, v_slots, span, scores)
        return o_NHE

    def silu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up_N2F)

    def gelu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return gelu_mul(gate_up_N2F)

    def sparse_gelu_mul(self, gate_up_N2F: torch.Tensor, deviations: float) -> torch.Tensor:
        return sparse_gelu_mul(gate_up_N2F, deviations)

    def gelu(self, x_NF: torch.Tensor) -> torch.Tensor:
        return gelu(x_NF)

    def sigmoid_mul(self, x_ND: torch.Tensor, score_N1: torch.Tensor) -> torch.Tensor:
        return row_by_row(torch.sigmoid, score_N1) * x_ND

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        return x_ND + y_ND

    def mul(self, x_NF: torch.Tensor, y_NF: torch.Tensor) -> torch.Tensor:
        return x_NF * y_NF

    def scale(self, x_ND: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x_ND * factor

    def match_copies(self, x_ND: torch.Tensor, y_NCD: torch.Tensor, floor: float) -> torch.Tensor:
        size_N1 = (x_ND * x_ND).mean(-1, keepdim=True).sqrt()
        squares_NC1 = (y_NCD * y_NCD).mean(-1, keepdim=True).clamp(min=floor)
        return torch.cat([x_ND.unsqueeze(1), y_NCD * (size_N1.unsqueeze(1) / squares_NC1.sqrt())], dim=1)

    def mix_copies(self, x_NCD: torch.Tensor, weights: torch.Tensor, z_NJD: torch.Tensor) -> torch.Tensor:
        # one after the other: the order of a product could depend on the number of rows
        for j in range(z_NJD.shape[1]):
            x_NCD = x_NCD + weights[..., j].unsqueeze(-1) * z_NJD[:, j : j + 1]
        return x_NCD

    def soft_cap(self, x_NV: torch.Tensor, cap: float) -> torch.Tensor:
        return row_by_row(torch.tanh, x_NV / cap) * cap

    def experts(self, x_ND: torch.Tensor, router_NX: torch.Tensor, experts: Experts) -> torch.Tensor:
        return mix_experts(x_ND, router_NX, experts)


class EmptyOps(ReferenceOps):
    """For the profile run: returns zeros for products, attention and experts; all else is computed as usual."""

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return x_NI.new_zeros((x_NI.shape[0], weight_OI.shape[0]))

    def linear_heads(self, x_NHE: torch.Tensor, weights_OI: list[torch.Tensor], *, first: int = 0) -> torch.Tensor:
        num_out, num_in = weights_OI[0].shape
        return x_NHE.new_zeros((*x_NHE.shape[:2], x_NHE.shape[2] - first - num_in + num_out))

    def attend(self, layer: int, q_NHE: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(q_NHE, memory_format=torch.contiguous_format)

    def experts(self, x_ND: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(x_ND)
