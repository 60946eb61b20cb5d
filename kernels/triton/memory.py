"""Device memory that all passes of a model share, its weights, and the head counts that launches depend on."""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.weights import Shape, Weights
from ..kv_cache import KVCache
from ..ops import RopeTable
from .attention import Parts, tile_tokens
from .configs import Tiles
from .mixture import Addresses


class RopeTables:
    """Rotary tables on the device, each copied once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[RopeTable, torch.Tensor, torch.Tensor]] = {}

    def of(self, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(cos_PR, sin_PR)` of a table."""
        if id(table) not in self._copies:
            cos_PR, sin_PR = table.cos_PR.to(self._device).contiguous(), table.sin_PR.to(self._device).contiguous()
            self._copies[id(table)] = (table, cos_PR, sin_PR)
        return self._copies[id(table)][1:]


@attrs.frozen
class Heads:
    """The model's attention heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    others: Heads | None = None
    """Of other layers, if not all are alike."""

    @property
    def widest(self) -> int:
        """Return the largest head's size."""
        return self.head_dim if self.others is None else max(self.head_dim, self.others.widest)

    def tile_tokens(self, tiles: Tiles) -> int:
        """Return how many tokens of a prompt one prefill program handles, in every layer."""
        mine = tile_tokens(tiles, self.num_heads // self.num_kv_heads, self.head_dim)
        return mine if self.others is None else min(mine, self.others.tile_tokens(tiles))


@attrs.frozen
class Memory:
    """Memory that all passes share."""

    cache: KVCache
    tables: torch.Tensor
    """Block table of each slot, int32."""
    parts: Parts
    rope_tables: RopeTables
    addresses: Addresses


class DeviceWeights:
    """Implements `Weights`: moves each tensor to the device as it is read; keeps one of each shape for `probe.py`."""

    def __init__(self, source: Weights, device: torch.device) -> None:
        self._source = source
        self._device = device
        self.matrices: dict[Shape, torch.Tensor] = {}

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self._moved(self._source.tensor(name, shape))

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        return self._moved(self._source.fused(parts))

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        self._source.check_all_used(ignore=ignore)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(self._device)
        if moved.dim() == 2:
            self.matrices.setdefault(tuple(moved.shape), moved)
        return moved
