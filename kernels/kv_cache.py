"""The paged KV cache: keys and values of each layer, head-major `[blocks, kv_heads, slots, head_dim]`, in one tensor.

A backend makes and owns it; only the backend's operations read and write it, through the block tables of the pass. They
also choose the layout of a head's part of a block: the CPU kernels keep its keys transposed (`cpu/csrc/program.h`).
Head-major, because attention reads one head at a time, whose slots are then contiguous (measured on CPU: 18 GB/s
against 13 to 14 for slot-major).

What must always hold: a slot that no token of the sequence has written never influences a result, whatever it holds,
NaN included. So the memory is not cleared here.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch


@attrs.frozen
class BlockShape:
    """What determines the size of a block."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values of every layer; `cache[layer]` is the pair."""

    def __init__(self, num_blocks: int, block: BlockShape, device: torch.device | None = None) -> None:
        """Allocate the memory, on the host (where a page is committed on its first write) or on a device."""
        shape = (block.num_layers, 2, num_blocks, block.num_kv_heads, block.block_size, block.head_dim)
        self.block_size = block.block_size
        self._all_L2BKSE = torch.empty(shape, dtype=block.dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self._all_L2BKSE]

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(k_BKSE, v_BKSE)` of a layer, writable."""
        return self._layers[layer]

    def __len__(self) -> int:
        return len(self._layers)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second, in every layer. All are read before any is written."""
        sources, destinations = torch.tensor(pairs, device=self._all_L2BKSE.device).T
        self._all_L2BKSE[:, :, destinations] = self._all_L2BKSE[:, :, sources]

    @torch.inference_mode()
    def fill(self, value: float) -> None:
        """Overwrite every slot of every layer; tests fill the cache with NaN."""
        self._all_L2BKSE.fill_(value)
