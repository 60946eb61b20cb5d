"""Records the operations of a model: the CPU's counterpart of a CUDA graph.

Models are written in Python, but steps must not run Python. `Recorder` passes small tensors to a model (two rows, whose
contents are never used) and records the inputs and the output of each call. `recording.py` makes a program of them.
Here are the operations with matrices, positions and the cache; those of single rows are in `row_recorder.py`.

What must always hold: as in `call_recorder.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kv_cache import KVCache
from ..ops import Experts, RopeTable
from . import program
from .adapted_products import AdaptedProducts
from .packing import PackedWeights
from .program import STORED, STORED_KV, Bounds
from .row_recorder import RowRecorder


class Recorder(RowRecorder):
    """Implements `quipu.kernels.ops.Ops` without computing anything."""

    def __init__(
        self, weights: PackedWeights, cache: KVCache, bounds: Bounds, adapters: AdaptedProducts | None = None
    ) -> None:
        """With `adapters`, products are recorded that adapters change; a row without one has the same bits."""
        super().__init__(weights)
        self._adapters = adapters
        self._cache = cache
        self._bounds = bounds
        self._dispatch_memories: dict[int, torch.Tensor] = {}  # by size

    def embed(
        self, token_ids_N: torch.Tensor, table_VD: torch.Tensor, scale: float = 1.0, *, is_exact: bool = False
    ) -> torch.Tensor:
        rows, width = table_VD.shape
        fields: dict[str, Any] = {"width": width, "out_width": rows, **self._matrix(table_VD)}
        fields["scale"] = scale if is_exact else float(torch.tensor(scale, dtype=table_VD.dtype))
        return self._record(program.EMBED, shape=(width,), **fields)

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        rows, width = weight_OI.shape
        fields: dict[str, Any] = {
            "width": width,
            "out_width": rows,
            "bias": None if bias_O is None else self._vector(bias_O),
            **self._matrix(weight_OI),
        }
        table = None if self._adapters is None else self._adapters.table(weight_OI)
        if table is None:
            return self._record(program.LINEAR, x=x_NI, shape=(rows,), **fields)
        rounds = self._weights.multiplies_pairs and fields["stored"] == STORED[torch.bfloat16]
        narrow_NR = self._record(
            program.LOW_RANK,
            x=x_NI,
            shape=(table.width,),
            width=width,
            stored=STORED[torch.bfloat16 if rounds else torch.float32],
            matrices=table.address,
        )
        fields |= {"matrices": table.address, "narrow_stride": table.width}
        return self._record(program.LINEAR, x=x_NI, v=narrow_NR, shape=(rows,), **fields)

    def linear_heads(self, x_NHE: torch.Tensor, weights_OI: list[torch.Tensor], *, first: int = 0) -> torch.Tensor:
        (_, num_heads, width), (num_out, num_in) = x_NHE.shape, weights_OI[0].shape
        return self._record(
            program.HEAD_LINEAR,
            x=x_NHE,
            shape=(num_heads, width - first - num_in + num_out),
            width=width,
            out_width=num_out,
            num_heads=num_heads,
            first=first,
            num_multiplied=num_in,
            also=self._matrices(weights_OI),
        )

    def rope(self, x_NHE: torch.Tensor, table: RopeTable) -> torch.Tensor:
        _, num_heads, width = x_NHE.shape
        return self._record(
            program.ROPE,
            x=x_NHE,
            shape=(num_heads, width),
            width=width,
            out_width=2 * table.cos_PR.shape[1],
            num_heads=num_heads,
            cos=self._vector(table.cos_PR),
            sin=self._vector(table.sin_PR),
            interleaved=table.is_interleaved,
        )

    def write_kv(self, layer: int, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> None:
        sizes: dict[str, Any] = {"num_kv_heads": k_NKE.shape[1], "width": k_NKE.shape[2]}
        self._record(program.WRITE_KV, x=k_NKE, z=v_NKE, shape=(0,), also=self._layer(layer), **sizes)

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
        _, num_heads, width = q_NHE.shape
        return self._record(
            program.ATTEND,
            x=q_NHE,
            shape=(num_heads, width),
            width=width,
            num_heads=num_heads,
            num_kv_heads=self._cache[layer][0].shape[1],
            scale=scale,
            window=window or 0,
            in_chunks=in_chunks,
            soft_cap=soft_cap or 0.0,
            bias=None if sinks_H is None else self._vector(sinks_H),
            also=self._layer(layer),
        )

    def experts(self, x_ND: torch.Tensor, router_NX: torch.Tensor, experts: Experts) -> torch.Tensor:
        width, chosen, biases, clamp = x_ND.shape[1], experts.num_chosen, experts.biases, experts.clamp
        shared: dict[str, Any] = {
            "num_experts": len(experts.down_DF),
            "num_chosen": chosen,
            "dispatch": self._dispatch_memory(len(experts.down_DF), chosen),
        }
        moved = {**shared, "activation": program.MUL if experts.choice.scales_inputs else 0}
        routed = self._route(router_NX, experts, shared)
        dispatched = self._record(program.DISPATCH, x=x_ND, z=routed, shape=(chosen * width,), width=width, **moved)

        def multiply(x: torch.Tensor, matrices: list[torch.Tensor], bias_XO: torch.Tensor | None) -> torch.Tensor:
            rows, hidden = matrices[0].shape
            fields: dict[str, Any] = {
                "width": hidden,
                "out_width": rows,
                "bias": None if bias_XO is None else self._vector(bias_XO),
            }
            also = self._matrices(matrices)
            return self._record(program.EXPERT_LINEAR, x=x, shape=(chosen * rows,), also=also, **fields, **shared)

        gate_up = multiply(dispatched, experts.gate_up_OD, None if biases is None else biases.gate_up_XO)
        hidden = experts.down_DF[0].shape[1]
        activation: dict[str, Any] = {} if clamp is None else {"scale": clamp.alpha, "soft_cap": clamp.limit}
        activation["activation"] = program.GELU_MUL if experts.is_gelu else 0
        activated = self._record(
            program.EXPERT_SILU_MUL, x=gate_up, shape=(chosen * hidden,), width=hidden, **activation, **shared
        )
        down = multiply(activated, experts.down_DF, None if biases is None else biases.down_XD)
        return self._record(program.COMBINE, x=routed, z=down, shape=(width,), width=width, **moved)

    def _route(self, router_NX: torch.Tensor, experts: Experts, shared: dict[str, Any]) -> torch.Tensor:
        choice = experts.choice
        return self._record(
            program.ROUTE,
            x=router_NX,
            shape=(2 * experts.num_chosen,),
            normalise=experts.normalise,
            activation=program.SIGMOID_MUL if choice.is_sigmoid else 0,
            by_score=choice.scales_inputs,
            bias=None if choice.bias_X is None else self._vector(choice.bias_X),
            num_groups=choice.num_groups,
            num_chosen_groups=choice.num_chosen_groups,
            scale=choice.factor,
            norm=None if choice.scale_X is None else self._vector(choice.scale_X),
            soft_cap=choice.mixer_range or 0.0,
            **shared,
        )

    def _dispatch_memory(self, num_experts: int, num_chosen: int) -> int:
        """Return the address of memory for assigning rows to experts (`experts.cpp`), shared by all layers."""
        size = 8 * num_experts + num_experts + 1 + self._bounds.num_tokens * num_chosen
        if size not in self._dispatch_memories:
            self._dispatch_memories[size] = torch.zeros(size, dtype=torch.int64)
            self.memory.append(self._dispatch_memories[size])
        return self._dispatch_memories[size].data_ptr()

    def _layer(self, layer: int) -> dict[str, int]:
        k_BKSE, v_BKSE = self._cache[layer]  # with 8-bit caches, bytes instead of slots
        return {"keys": k_BKSE.data_ptr(), "values": v_BKSE.data_ptr(), "stored": STORED_KV[k_BKSE.dtype]}
