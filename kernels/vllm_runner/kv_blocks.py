"""Blocks of the KV cache that vLLM's runner has allocated: copied and cleared before a pass, moved for the host tier.

vLLM's attention multiplies slots that are not written yet by 0, which does not help against NaN: what a broken sequence
has left in a block would break the next one. So a block is cleared before its first slot is written. The runner could
do both itself, but would clear before it copies, and a pass may write to a block that it also copies from.

The runner keeps a tensor for each layer, whose first dimension is the block. On the host a block is its parts in all
layers, one after the other.

What must always hold: layers that share their keys and values are copied once; a block has `num_bytes` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch


class KVBlocks:
    """The tensors of all layers."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        """Raises ValueError for tensors that are not divided into blocks by their first dimension."""
        distinct = {tensor.data_ptr(): tensor for tensor in tensors}
        for tensor in distinct.values():
            if len(tensor) != num_blocks or not tensor[0].is_contiguous():
                raise ValueError(
                    f"the vllm executor needs a KV cache of {num_blocks} contiguous blocks, and this model's attention "
                    f"keeps one of shape {tuple(tensor.shape)}"
                )
        self._layers = [tensor.view(torch.uint8).flatten(1) for tensor in distinct.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(layer.shape[1] for layer in self._layers)

    @torch.inference_mode()
    def prepare(self, copies: Sequence[tuple[int, int]], fresh: Sequence[int]) -> None:
        """Copy the first block of each pair to the second, all read before any is written; then clear fresh blocks."""
        if copies:
            sources, destinations = torch.tensor(copies, device=self._layers[0].device).T
            for layer_Bx in self._layers:
                layer_Bx[destinations] = layer_Bx[sources]
        if fresh:
            cleared = torch.tensor(fresh, device=self._layers[0].device)
            for layer_Bx in self._layers:
                layer_Bx.index_fill_(0, cleared, 0)

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], to: memoryview) -> None:
        """Copy blocks to the host. Raises ValueError for memory of another size."""
        for layer_x, host_x in self._parts(blocks, to):
            if layer_x.is_cpu:
                np.copyto(host_x, layer_x.numpy())  # without the GIL, in this thread alone
            else:
                torch.from_numpy(host_x).copy_(layer_x)

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], source: memoryview) -> None:
        """Copy to blocks what `read` has copied from others. Raises ValueError for memory of another size."""
        for layer_x, host_x in self._parts(blocks, source):
            if layer_x.is_cpu:
                np.copyto(layer_x.numpy(), host_x)
            else:
                layer_x.copy_(torch.from_numpy(host_x))

    @torch.inference_mode()
    def fill(self, value: float, dtype: torch.dtype) -> None:
        """Overwrite every slot; tests fill the cache with NaN."""
        for layer_Bx in self._layers:
            layer_Bx.view(dtype).fill_(value)

    def _parts(self, blocks: Sequence[int], memory: memoryview) -> Iterator[tuple[torch.Tensor, npt.NDArray[np.uint8]]]:
        if memory.nbytes != len(blocks) * self.num_bytes:
            raise ValueError(f"{memory.nbytes} bytes for {len(blocks)} blocks of {self.num_bytes}")
        host_x = np.frombuffer(memory, np.uint8)
        start = 0
        for block in blocks:
            for layer_Bx in self._layers:
                part_x = layer_Bx[block]
                yield part_x, host_x[start : start + len(part_x)]
                start += len(part_x)
