"""How the reference reads and writes the keys or values of one layer: as they are, or in 8 bits with scales.

What must always hold: a slot's bits follow from the head that is written to it alone; infinity and NaN are never lost,
so that a request with such keys or values fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..kv_cache import KVCache, ScaledSlots


class Slots(ABC):
    """Keys or values of one layer."""

    def __init__(self, cache_BKSE: torch.Tensor) -> None:
        self._cache_BKSE = cache_BKSE
        self.num_kv_heads, self.block_size = cache_BKSE.shape[1:3]

    @abstractmethod
    def write(self, blocks_n: torch.Tensor, offsets_n: torch.Tensor, new_nKE: torch.Tensor) -> None:
        """Write each token to its slot of its block."""

    @abstractmethod
    def read(self, blocks_B: torch.Tensor) -> torch.Tensor:
        """Return these blocks in float32, `[B, K, S, E]`."""


def slots_of(cache: KVCache, layer: int) -> tuple[Slots, Slots]:
    """Return the keys and the values of a layer."""
    if cache.is_scaled:
        k_slots, v_slots = cache.scaled(layer)
        return _Scaled(k_slots), _Scaled(v_slots)
    k_BKSE, v_BKSE = cache[layer]
    return _Plain(k_BKSE), _Plain(v_BKSE)


class _Plain(Slots):
    def write(self, blocks_n: torch.Tensor, offsets_n: torch.Tensor, new_nKE: torch.Tensor) -> None:
        self._cache_BKSE[blocks_n, :, offsets_n] = new_nKE.to(self._cache_BKSE.dtype)

    def read(self, blocks_B: torch.Tensor) -> torch.Tensor:
        return self._cache_BKSE[blocks_B].float()


class _Scaled(Slots):
    def __init__(self, slots: ScaledSlots) -> None:
        super().__init__(slots.codes_BKSE)
        self._scales_BKS = slots.scales_BKS

    def write(self, blocks_n: torch.Tensor, offsets_n: torch.Tensor, new_nKE: torch.Tensor) -> None:
        codes_nKE, scales_nK = round_heads(new_nKE)
        self._cache_BKSE[blocks_n, :, offsets_n] = codes_nKE
        self._scales_BKS[blocks_n, :, offsets_n] = scales_nK

    def read(self, blocks_B: torch.Tensor) -> torch.Tensor:
        return self._cache_BKSE[blocks_B] * self._scales_BKS[blocks_B].unsqueeze(-1)


def round_heads(x_nKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each head to integers from -127 to 127, half to even, times a scale of its own: codes and scales.

    The scale is 1/127 of the head's largest magnitude: 0 for a head of zeros, NaN for one with infinity or NaN.
    """
    largest_nK = x_nKE.abs().amax(-1)
    scales_nK = torch.where(largest_nK.isfinite(), largest_nK / 127, torch.nan)
    has_codes_nK1 = (scales_nK > 0).unsqueeze(-1)
    steps_nKE = x_nKE / torch.where(has_codes_nK1, scales_nK.unsqueeze(-1), 1.0)
    codes_nKE = torch.where(has_codes_nK1, steps_nKE.round().clamp(-127, 127), 0.0)
    return codes_nKE.to(torch.int8), scales_nK
