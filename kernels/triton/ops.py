"""`Ops` as kernel launches, some of which are deferred so that one launch can do several operations.

`runner.py` makes one for each pass (or for each CUDA graph, which records the launches). A model asks for small steps,
and each launch costs; so a sum is deferred until the norm that follows it, and the norm and rotation of queries and
keys until the keys are written. The memory of a deferred result is there at once, so a model can view it in other
shapes; its values are computed when an operation needs them (`_computed`).

What must always hold: no kernel reads a tensor that is still deferred. Queries and keys that are deferred beyond the
next layer's `write_kv` are dropped: by then no model reads them again.
"""

from __future__ import annotations

import attrs
import torch

import triton

from ..ops import Experts, RopeTable
from . import activation, attention
from .columns import Columns
from .configs import Tiles
from .deferred import DeferredHeads, DeferredSum
from .launch_shapes import block_of, dense_like, place_of, rows_of, warps_for
from .matrices import Linear
from .memory import Memory
from .mixture import mix, multiply_heads
from .rope_kv import rope_and_write_kernel, rope_kernel
from .row_ops import RowOps
from .triton_adapters import RowAdapters


class TritonOps(RowOps):
    """Implements `quipu.kernels.ops.Ops` over columns on the device."""

    def __init__(
        self,
        columns: Columns,
        memory: Memory,
        tiles: Tiles,
        linear: Linear,
        *,
        results_in: torch.dtype | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """`results_in`: dtype of matrix products where it differs from that of their arguments (the output head);
        `adapters`: those of the rows, if any has one."""
        self._columns = columns
        self._memory = memory
        self._tiles = tiles
        self._linear = linear
        self._results_in = results_in
        self._adapters = adapters
        self._deferred: dict[int, DeferredHeads | DeferredSum] = {}  # by the address of the result
        self._deferred_before: list[DeferredHeads] = []

    def embed(
        self, token_ids_N: torch.Tensor, table_VD: torch.Tensor, scale: float = 1.0, *, is_exact: bool = False
    ) -> torch.Tensor:
        num_tokens, (num_rows, width) = token_ids_N.shape[0], table_VD.shape
        x_ND = table_VD.new_empty((num_tokens, width))
        scale = scale if is_exact else float(torch.tensor(scale, dtype=table_VD.dtype))
        activation.embed_kernel[rows_of(num_tokens, width)](
            token_ids_N, table_VD, x_ND, scale, num_rows, width, block_of(width)
        )
        return x_ND

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        y_NO = self._linear(self._computed(x_NI), weight_OI, bias_O, self._results_in or x_NI.dtype)
        if self._adapters is not None:
            self._adapters.apply(x_NI, weight_OI, y_NO)
        return y_NO

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dim() == 3:
            return self._defer(DeferredHeads(self._computed(x), dense_like(x), weight, eps, None))
        deferred = self._deferred.get(place_of(x))
        out_ND = dense_like(x)
        if isinstance(deferred, DeferredSum):
            del self._deferred[place_of(x)]
            self._launch_norm(deferred.x_ND, deferred.y_ND, deferred.out_ND, weight, eps, out_ND)
        else:
            self._launch_norm(self._computed(x), None, x, weight, eps, out_ND)
        return out_ND

    def norm_latent(self, x_NI: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x_NI, width = self._computed(x_NI), weight.shape[0]
        return torch.cat([x_NI[:, width:], self.rms_norm(x_NI[:, :width], weight, eps)], dim=1)

    def linear_heads(self, x_NHE: torch.Tensor, weights_OI: list[torch.Tensor], *, first: int = 0) -> torch.Tensor:
        return multiply_heads(self._computed(x_NHE), weights_OI, first, self._memory.addresses, self._tiles)

    def rope(self, x_NHE: torch.Tensor, table: RopeTable) -> torch.Tensor:
        deferred = self._deferred.get(place_of(x_NHE))
        out_NHE = dense_like(x_NHE)
        if isinstance(deferred, DeferredHeads) and deferred.table is None and deferred.out_NHE.shape == x_NHE.shape:
            return self._defer(attrs.evolve(deferred, out_NHE=out_NHE, table=table))
        return self._defer(DeferredHeads(self._computed(x_NHE), out_NHE, None, 0.0, table))

    def write_kv(self, layer: int, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> None:
        v_NKE = self._computed(v_NKE)
        deferred = self._deferred.get(place_of(k_NKE))
        if isinstance(deferred, DeferredHeads):
            keys = deferred
        else:
            keys = DeferredHeads(self._computed(k_NKE), k_NKE, None, 0.0, None)
        queries = self._queries_for(keys) if keys is deferred else None
        self._launch_write(layer, queries, keys, v_NKE)
        if queries is not None:
            del self._deferred[place_of(queries.out_NHE)]
        self._drop_stale()

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
        return attention.attend(
            self._computed(q_NHE).contiguous(), *self._memory.cache[layer], self._columns, self._memory.tables,
            self._memory.parts, self._tiles, scale=scale, window=window, in_chunks=in_chunks, soft_cap=soft_cap,
            sinks_H=sinks_H,
        )  # fmt: skip

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        out_ND = dense_like(x_ND)
        x_ND, y_ND = self._computed(x_ND).contiguous(), self._computed(y_ND).contiguous()
        self._deferred[place_of(out_ND)] = DeferredSum(x_ND, y_ND, out_ND)
        return out_ND

    def experts(self, x_ND: torch.Tensor, router_NX: torch.Tensor, experts: Experts) -> torch.Tensor:
        clamp, plain = experts.clamp, self.gelu_mul if experts.is_gelu else self.silu_mul
        return mix(
            self._computed(x_ND), self._computed(router_NX), experts, self._memory.addresses, self._tiles,
            plain if clamp is None else lambda x_P2F: self._gated(
                x_P2F, activation.clamped_swiglu_kernel, clamp.alpha, clamp.limit
            ),
        )  # fmt: skip

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """Return a result of the pass, computed if it was deferred."""
        return self._computed(x)

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same tensor, computed if it was deferred."""
        deferred = self._deferred.pop(place_of(x), None)
        if isinstance(deferred, DeferredSum):
            num_rows, width = deferred.out_ND.shape
            grid = rows_of(num_rows, width)
            activation.add_kernel[grid](deferred.x_ND, deferred.y_ND, deferred.out_ND, width, block_of(width))
        elif isinstance(deferred, DeferredHeads):
            self._launch_heads(deferred)
        return x

    def _queries_for(self, keys: DeferredHeads) -> DeferredHeads | None:
        """Return the latest deferred heads that can share a launch with these keys."""
        for deferred in reversed(self._deferred.values()):
            if isinstance(deferred, DeferredHeads) and deferred is not keys and deferred.can_share_launch(keys):
                return deferred
        return None

    def _defer(self, heads: DeferredHeads) -> torch.Tensor:
        self._deferred[place_of(heads.out_NHE)] = heads
        return heads.out_NHE

    def _drop_stale(self) -> None:
        """Drop heads that were deferred before the last layer's keys were written; sums stay."""
        for heads in self._deferred_before:
            place = place_of(heads.out_NHE)
            if self._deferred.get(place) is heads:
                del self._deferred[place]
        self._deferred_before = [
            deferred for deferred in self._deferred.values() if isinstance(deferred, DeferredHeads)
        ]

    def _launch_norm(
        self, x_ND: torch.Tensor, y_ND: torch.Tensor | None, sum_ND: torch.Tensor, weight_D: torch.Tensor, eps: float,
        out_ND: torch.Tensor,
    ) -> None:  # fmt: skip
        num_rows, width = x_ND.shape
        block = triton.next_power_of_2(width)
        activation.rms_norm_kernel[(num_rows,)](
            x_ND, sum_ND if y_ND is None else y_ND, weight_D, sum_ND, out_ND, x_ND.stride(0), eps, y_ND is not None,
            width, block, num_warps=warps_for(block), enable_fp_fusion=self._tiles.fusion,
        )  # fmt: skip

    def _launch_heads(self, t: DeferredHeads) -> None:
        cos_PR, sin_PR, *shape = self._rope_arguments(t)
        num_tokens, num_heads, _ = t.x_NHE.shape
        rope_kernel[(num_tokens,)](
            t.x_NHE, t.x_NHE.stride(0), t.x_NHE.stride(1), t.x_NHE if t.weight_E is None else t.weight_E, t.eps,
            cos_PR, sin_PR, self._columns.device["positions"], t.out_NHE, t.weight_E is not None, t.table is not None,
            num_heads, triton.next_power_of_2(num_heads), *shape, enable_fp_fusion=self._tiles.fusion,
        )  # fmt: skip

    def _launch_write(
        self, layer: int, queries: DeferredHeads | None, keys: DeferredHeads, v_NKE: torch.Tensor
    ) -> None:
        k_BKSE, v_BKSE = self._memory.cache[layer]
        cos_PR, sin_PR, *shape = self._rope_arguments(keys)
        q = queries or keys
        q_weight = q.x_NHE if q.weight_E is None else q.weight_E
        k_weight = keys.x_NHE if keys.weight_E is None else keys.weight_E
        c = self._columns.device
        num_tokens, num_heads, num_kv_heads = q.x_NHE.shape[0], q.x_NHE.shape[1], keys.x_NHE.shape[1]
        rope_and_write_kernel[(num_tokens, 2 if queries is None else 3)](
            q.x_NHE, q.x_NHE.stride(0), q.x_NHE.stride(1), keys.x_NHE, keys.x_NHE.stride(0), keys.x_NHE.stride(1),
            v_NKE, v_NKE.stride(0), v_NKE.stride(1), q_weight, k_weight, keys.eps, cos_PR, sin_PR, c["positions"],
            c["write_slots"], q.out_NHE, k_BKSE, v_BKSE, k_BKSE.stride(0), k_BKSE.stride(1), k_BKSE.stride(2),
            1 if queries is None else 0, keys.weight_E is not None, keys.table is not None, k_BKSE.shape[2], num_heads,
            triton.next_power_of_2(num_heads), num_kv_heads, triton.next_power_of_2(num_kv_heads), *shape,
            enable_fp_fusion=self._tiles.fusion,
        )  # fmt: skip

    def _rope_arguments(self, t: DeferredHeads) -> tuple[torch.Tensor, torch.Tensor, bool, int, int, int, int]:
        """Return cosines, sines, whether pairs are neighbours, E, R, and block sizes for R and for the elements from 2R
        on."""
        head_dim = t.x_NHE.shape[2]
        if t.table is None:
            cos_PR = sin_PR = t.x_NHE
            half = head_dim // 2
        else:
            cos_PR, sin_PR = self._memory.rope_tables.of(t.table)
            half = cos_PR.shape[1]
        rest = head_dim - 2 * half
        rest_block = triton.next_power_of_2(rest) if rest else 0
        is_interleaved = t.table is not None and t.table.is_interleaved
        return cos_PR, sin_PR, is_interleaved, head_dim, half, triton.next_power_of_2(half), rest_block
