"""Records the operations of a model: the CPU's counterpart of a CUDA graph.

Models are written in Python, but steps must not run Python. `Recorder` passes small tensors to a model (two rows, whose
contents are never used) and records the inputs and the output of each call. `recording.py` makes a program of them.

What must always hold: every value that a model computes comes from a recorded call. A tensor computed by torch does
not, and using it raises an error at load.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kv_cache import KVCache
from ..ops import Experts, RopeTable
from . import program
from .adapted_products import AdaptedProducts
from .packing import Packed, PackedWeights
from .program import STORED, STORED_KV, Bounds
from .recorded import Place, RecordedOp, Values

ROWS = 2  # with one row, the stride between rows would be undefined


class Recorder:
    """Implements `quipu.kernels.ops.Ops` without computing anything."""

    def __init__(
        self, weights: PackedWeights, cache: KVCache, bounds: Bounds, adapters: AdaptedProducts | None = None
    ) -> None:
        """With `adapters`, products are recorded that adapters change; a row without one has the same bits."""
        self._weights = weights
        self._adapters = adapters
        self._cache = cache
        self._bounds = bounds
        self.recorded: list[RecordedOp] = []
        self.values = Values()
        self.memory: list[torch.Tensor | Packed] = []
        self._value_of: dict[int, tuple[int, torch.Tensor]] = {}  # by address of the small tensor
        self._dispatch_memories: dict[int, torch.Tensor] = {}  # by size
        self._head = False

    def start_head(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Gather the rows of the selected tokens from `x_ND`; all later operations work on these."""
        self._head = True
        return self._record(program.GATHER, x=x_ND, shape=(x_ND.shape[1],), width=x_ND.shape[1])

    def embed(
        self, token_ids_N: torch.Tensor, table_VD: torch.Tensor, scale: float = 1.0, *, is_exact: bool = False
    ) -> torch.Tensor:
        width = table_VD.shape[1]
        scale = scale if is_exact else float(torch.tensor(scale, dtype=table_VD.dtype))
        return self._record(program.EMBED, shape=(width,), width=width, scale=scale, also=self._matrix(table_VD))

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

    def silu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return self._gated(program.SILU_MUL, gate_up_N2F)

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        return self._record(program.ADD, x=x_ND, z=y_ND, shape=(x_ND.shape[1],), width=x_ND.shape[1])

    def mul(self, x_NF: torch.Tensor, y_NF: torch.Tensor) -> torch.Tensor:
        return self._record(program.MUL, x=x_NF, z=y_NF, shape=(x_NF.shape[1],), width=x_NF.shape[1])

    def scale(self, x_ND: torch.Tensor, factor_1: torch.Tensor) -> torch.Tensor:
        width, factor = x_ND.shape[1], self._vector(factor_1)
        return self._record(program.MUL, x=x_ND, shape=(width,), width=width, weight=factor)

    def sigmoid_mul(self, x_ND: torch.Tensor, score_N1: torch.Tensor) -> torch.Tensor:
        return self._record(program.SIGMOID_MUL, x=x_ND, z=score_N1, shape=(x_ND.shape[1],), width=x_ND.shape[1])

    def gelu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return self._gated(program.GELU_MUL, gate_up_N2F)

    def gelu(self, x_NF: torch.Tensor) -> torch.Tensor:
        return self._record(program.GELU, x=x_NF, shape=(x_NF.shape[1],), width=x_NF.shape[1])

    def _gated(self, kind: int, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        width = gate_up_N2F.shape[1] // 2
        return self._record(kind, x=gate_up_N2F, shape=(width,), width=width)

    def soft_cap(self, x_NV: torch.Tensor, cap: float) -> torch.Tensor:
        return self._record(program.SOFT_CAP, x=x_NV, shape=(x_NV.shape[1],), width=x_NV.shape[1], soft_cap=cap)

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

    def _record(
        self,
        kind: int,
        *,
        shape: tuple[int, ...],
        x: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        also: dict[str, int] | None = None,
        **fields: Any,
    ) -> torch.Tensor:
        """Record a call; return the tensor that represents its result."""
        result = torch.empty(ROWS, *shape)
        value = self.values.add(result[0].numel(), on_logits_rows=self._head)
        # an empty result (write_kv) has no address, and cannot be used
        if result.numel():
            self._value_of[result.untyped_storage().data_ptr()] = (value, result)
        fields |= {"kind": kind, "on_logits_rows": self._head, "no_barrier": False, **(also or {})}
        self.recorded.append(RecordedOp(fields, self._place(x), self._place(z), Place(value, 0), self._place(v)))
        return result

    def _place(self, tensor: torch.Tensor | None) -> Place | None:
        if tensor is None:
            return None
        value, whole = self._value_of.get(tensor.untyped_storage().data_ptr(), (-1, tensor))
        inner = tensor[0]
        if value < 0 or tensor.stride(0) != whole.stride(0) or not inner.is_contiguous():
            raise ValueError("the model computes something outside of Ops, or reshapes results across rows")
        return Place(value, int(tensor.storage_offset()))

    def _vector(self, tensor: torch.Tensor) -> int:
        """Return the address of a float32 copy of a vector or table."""
        tensor = tensor.float().contiguous()
        self.memory.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, placeholder: torch.Tensor) -> dict[str, int]:
        matrix = self._weights.matrix(placeholder)
        self.memory.append(matrix)
        return {"weight": matrix.address, "stored": matrix.stored}

    def _matrices(self, placeholders: list[torch.Tensor]) -> dict[str, int]:
        matrices = [self._matrix(placeholder) for placeholder in placeholders]
        if len({matrix["stored"] for matrix in matrices}) > 1:
            raise ValueError("some experts of a layer are quantized and others are not: that is not supported")
        addresses = torch.tensor([matrix["weight"] for matrix in matrices], dtype=torch.int64)
        self.memory.append(addresses)
        return {"matrices": addresses.data_ptr(), "stored": matrices[0]["stored"]}

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
