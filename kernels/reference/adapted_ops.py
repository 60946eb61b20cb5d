"""The operations of the reference in a pass with adapters: products of a row that has one are changed by it.

What must always hold: the bits of a row follow from the row and its own adapter; so rows are multiplied in whole tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..adapters.adapter_slots import AdapterSlots
from ..adapters.low_rank import LowRank, combine
from ..adapters.named_weights import NamedWeights
from ..kv_cache import KVCache
from .ops import ReferenceOps
from .plan import StepPlan
from .rows import ROWS, multiply, round_up

NO_SLOT = -1
"""The slot of a token without an adapter, in a tensor."""


class ReferenceAdapters(AdapterSlots):
    """Keeps the matrices of each slot, in float32, by the id of the matrix whose products they change."""

    def __init__(self, weights: NamedWeights, *, dtype: torch.dtype, max_loras: int, max_rank: int) -> None:
        super().__init__(weights, dtype=dtype, max_loras=max_loras, max_rank=max_rank)
        self._matrices: dict[int, dict[int, LowRank]] = {}

    @property
    def num_bytes(self) -> int:
        return super().num_bytes * 4 // self._dtype.itemsize

    def _put(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        combined = {key: combine(parts, matrices) for key, (_, parts) in self._weights.matrices.items()}
        self._matrices[slot] = {
            key: LowRank(low.a_RI.float(), low.b_OR.float()) for key, low in combined.items() if low is not None
        }

    def _clear(self, slot: int) -> None:
        del self._matrices[slot]

    def of_tokens(self, slots_n: torch.Tensor) -> list[tuple[torch.Tensor, dict[int, LowRank]]]:
        """Return the tokens of each slot, and its matrices; a slot of -1 is none."""
        slots = sorted(set(slots_n.tolist()) - {NO_SLOT})
        return [(torch.where(slots_n == slot)[0], self._matrices[slot]) for slot in slots]


class AdaptedOps(ReferenceOps):
    """Implements `quipu.kernels.ops.Ops` for one pass."""

    def __init__(
        self, plan: StepPlan, cache: KVCache, dtype: torch.dtype, adapters: ReferenceAdapters, slots_n: torch.Tensor
    ) -> None:
        """`slots_n` has the slot of each token's adapter, or `NO_SLOT`."""
        super().__init__(plan, cache, dtype)
        self._adapters = adapters
        self._slots_n = slots_n
        self._groups = adapters.of_tokens(slots_n)

    def select(self, tokens: Sequence[int]) -> None:
        self._groups = self._adapters.of_tokens(self._slots_n[list(tokens)])

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        y_NO = super().linear(x_NI, weight_OI, bias_O)
        for tokens_m, matrices in self._groups:
            low = matrices.get(id(weight_OI))
            if low is not None:
                tile_MI = x_NI.new_zeros((round_up(len(tokens_m), ROWS), x_NI.shape[1]))
                tile_MI[: len(tokens_m)] = x_NI[tokens_m]
                y_NO[tokens_m] += multiply(multiply(tile_MI, low.a_RI), low.b_OR)[: len(tokens_m)]
        return y_NO
