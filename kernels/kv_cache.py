"""The paged KV cache: keys and values of each layer, head-major `[blocks, kv_heads, slots, head_dim]`, in one tensor.

Made and owned by a backend; written and read only by its operations, through the block tables of the pass. How a head's
part of a block is laid out is their own affair, too: the CPU kernels keep its keys turned (`cpu/csrc/program.h`).
Head-major, because attention reads one head at a time and then finds its slots side by side (measured on CPU: 18 GB/s
against 13 to 14 for slot-major).

What must always hold: a slot that no token of the sequence has written never influences a result, whatever stands in
it, NaN included. That is why the memory is not even cleared here.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch


@attrs.frozen
class BlockShape:
    """What decides how large a block is."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one block's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values of every layer; index it by layer for the pair."""

    def __init__(self, num_blocks: int, block: BlockShape, device: torch.device | None = None) -> None:
        """Reserve the memory: of the machine (which commits a page when it is first written), or of a device."""
        shape = (block.num_layers, 2, num_blocks, block.num_kv_heads, block.block_size, block.head_dim)
        self.block_size = block.block_size
        self._all_L2BKSE = torch.empty(shape, dtype=block.dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self._all_L2BKSE]

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(k_BKSE, v_BKSE)` of a layer, writable."""
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
        """Overwrite every slot of every layer; tests poison the pool with NaN."""
        self._all_L2BKSE.fill_(value)
