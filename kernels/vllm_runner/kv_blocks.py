"""Blocks of the KV cache that vLLM's runner has allocated: copied and cleared before a pass, moved for the host tier.

vLLM's attention multiplies slots that are not written yet by 0, which does not help against NaN: what a broken sequence
has left in a block would break the next one. So a block is cleared before a pass that writes its first slot but not its
last one. The runner could do both itself, but would clear before it copies, and a pass may write to a block that it
also copies from.

The runner keeps a tensor for each layer, whose first dimension is the block. On the host a block is the parts of all
ranks, one after the other, and in each its parts in all layers. A rank reads and writes its own.

What must always hold: layers that share their keys and values are copied once; a block has `num_bytes` bytes, of which
`own_bytes` are this rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..triton.device import send


class KVBlocks:
    """The tensors of all layers, as one rank has them."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int, rank: int = 0, num_ranks: int = 1) -> None:
        """Raises ValueError for tensors that are not divided into blocks by their first dimension."""
        self._rank = rank
        distinct = {tensor.data_ptr(): tensor for tensor in tensors}
        for tensor in distinct.values():
            if len(tensor) != num_blocks or not tensor[0].is_contiguous():
                raise ValueError(
                    f"the vllm executor needs a KV cache of {num_blocks} contiguous blocks, and this model's attention "
                    f"keeps one of shape {tuple(tensor.shape)}"
                )
        self._layers = [tensor.view(torch.uint8).flatten(1) for tensor in distinct.values()]
        self._in_words = [_in_words(layer_Bx) for layer_Bx in self._layers]
        self.own_bytes = sum(layer.shape[1] for layer in self._layers)
        """Of one block in all layers of this rank."""
        self.num_bytes = self.own_bytes * num_ranks
        """Of one block in all layers of all ranks, which have equal parts."""

    @torch.inference_mode()
    def prepare(self, copies: Sequence[tuple[int, int]], fresh: Sequence[int]) -> None:
        """Copy the first block of each pair to the second, all read before any is written; then clear fresh blocks."""
        if copies:
            sources, destinations = send(torch.tensor(copies), self._layers[0].device).T
            for layer_Bw in self._in_words:
                layer_Bw.index_copy_(0, destinations, layer_Bw.index_select(0, sources))
        if fresh:
            cleared = send(torch.tensor(fresh), self._layers[0].device)
            for layer_Bw in self._in_words:
                layer_Bw.index_fill_(0, cleared, 0)

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], to: memoryview) -> None:
        """Copy this rank's parts of blocks to the host. Raises ValueError for memory of another size."""
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

    def _parts(self, blocks: Sequence[int], memory: memoryview) -> Iterator[tuple[torch.Tensor, npt.NDArray[np.uint8]]]:
        if memory.nbytes != len(blocks) * self.num_bytes:
            raise ValueError(f"{memory.nbytes} bytes for {len(blocks)} blocks of {self.num_bytes}")
        host_x = np.frombuffer(memory, np.uint8)
        for index, block in enumerate(blocks):
            start = index * self.num_bytes + self._rank * self.own_bytes
            for layer_Bx in self._layers:
                part_x = layer_Bx[block]
                yield part_x, host_x[start : start + len(part_x)]
                start += len(part_x)


def _in_words(layer_Bx: torch.Tensor) -> torch.Tensor:
    """Return a view of words of 8 bytes, where blocks consist of them: torch fills and copies these one by one."""
    is_whole = layer_Bx.shape[1] % 8 == 0 and layer_Bx.data_ptr() % 8 == 0
    return layer_Bx.view(torch.int64) if is_whole else layer_Bx
