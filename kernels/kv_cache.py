"""The paged KV cache: keys and values of each layer, head-major `[blocks, kv_heads, slots, head_dim]`, in one memory.

A backend owns it; only the backend's operations read and write it, through the block tables of the pass. They also
choose the layout of a head's part of a block: the CPU kernels keep its keys transposed (`cpu/csrc/program.h`).
Head-major, because attention reads one head at a time (measured on CPU: 18 GB/s against 13 to 14 for slot-major).

In 8 bits a head's part of a block is the slots' int8 elements and after them one float32 scale for each slot, so that
whatever copies a block copies its scales: `[blocks, kv_heads, bytes]`. An element times its slot's scale is its value.

A model whose keys are latents, of which values are made, too (`models/latent.py`), has one vector for both: then keys
and values are the same memory.

Layers may have different heads. Those with the same ones are a group, whose memory is one piece; a block on the host,
or in another tier, is its part of each group, one after the other.

What must always hold: a slot that no token of the sequence has written never influences a result, whatever it holds,
NaN included. So the memory is not cleared here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from .shared_memory import share_memory

KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int8": torch.int8}
_SCALE_BYTES = torch.float32.itemsize

CopyRows: TypeAlias = Callable[[int, int, int, int, int, int], object]
"""Copies rows: two addresses, to and from; how many; the bytes of one; and the distances of rows, to and from."""


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that `BackendConfig.kv_cache_dtype` names; `dtype` is that of the weights.

    Raises ValueError for an unknown name.
    """
    if name != "auto" and name not in KV_DTYPES:
        raise ValueError(f"unknown kv_cache_dtype {name!r}: choose 'auto', {', '.join(map(repr, KV_DTYPES))}")
    return KV_DTYPES.get(name, dtype)


@attrs.frozen
class OtherHeads:
    """The heads of layers in which they differ from most."""

    layers: frozenset[int]
    num_kv_heads: int
    head_dim: int


@attrs.frozen
class BlockShape:
    """What determines the size of a block."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    is_latent: bool = False
    """Whether a token's value is its key, and stored once."""
    others: OtherHeads | None = None
    """Layers with other heads than these."""

    @property
    def num_kinds(self) -> int:
        """Return 2, for keys and values, or 1."""
        return 1 if self.is_latent else 2

    @property
    def is_scaled(self) -> bool:
        return self.dtype == torch.int8

    @property
    def scales_at(self) -> int:
        """Where the scales begin in a head's part of a block, in bytes."""
        return -(-self.block_size * self.head_dim // _SCALE_BYTES) * _SCALE_BYTES

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys, or values, in one block of one layer, including scales."""
        if self.is_scaled:
            return self.scales_at + self.block_size * _SCALE_BYTES
        return self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers, including scales."""
        if self.others is not None:
            return sum(group.num_bytes for _, group in self.groups)
        return self.num_kinds * self.num_layers * self.num_kv_heads * self.head_bytes

    @property
    def groups(self) -> list[tuple[list[int], BlockShape]]:
        """Return the layers with the same heads, and the shape of a block of these alone; first the layer of most."""
        every, others = range(self.num_layers), self.others
        if others is None:
            return [(list(every), self)]
        alike, rest = ([n for n in every if (n in others.layers) == other] for other in (False, True))
        narrow = attrs.evolve(self, num_layers=len(alike), others=None)
        wide = attrs.evolve(narrow, num_layers=len(rest), num_kv_heads=others.num_kv_heads, head_dim=others.head_dim)
        return [(layers, shape) for layers, shape in ((alike, narrow), (rest, wide)) if layers]


@attrs.frozen
class ScaledSlots:
    """Keys or values of one layer in 8 bits, as views of the cache."""

    codes_BKSE: torch.Tensor
    """int8, from -127 to 127."""
    scales_BKS: torch.Tensor
    """float32."""


class _Group:
    """Keys and values of layers with the same heads, in one tensor."""

    def __init__(self, all_L2BKx: torch.Tensor, shape: BlockShape) -> None:
        self.shape = shape
        self.all_L2BKx = all_L2BKx
        self.bytes_L2Bx = all_L2BKx.view(torch.uint8).flatten(3)

    @property
    def rows(self) -> tuple[int, int]:
        """Return how many rows there are of which each is one kind of one layer, and the bytes of a block in one."""
        return self.shape.num_kinds * self.shape.num_layers, self.bytes_L2Bx.shape[3]

    def views(self, bytes_x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements and the scales of heads' parts of blocks."""
        size, width = self.shape.block_size, self.shape.head_dim
        codes = bytes_x[..., : size * width].view(*bytes_x.shape[:-1], size, width)
        return codes, bytes_x[..., self.shape.scales_at :].view(torch.float32)

    def fill(self, value: float) -> None:
        if not self.shape.is_scaled:
            self.all_L2BKx.fill_(value)
            return
        codes, scales = self.views(self.all_L2BKx)
        codes.fill_(1)
        scales.fill_(value)


class KVCache:
    """Keys and values of every layer; `cache[layer]` is the pair."""

    def __init__(
        self, num_blocks: int, block: BlockShape, device: torch.device | None = None, *, is_shared: bool = False
    ) -> None:
        """Allocate the memory, on the host (where a page is committed on its first write) or on a device.

        With `is_shared`, other processes of the host may map it, if the system can do that. Raises MemoryError.
        """
        self.block_size = block.block_size
        self.is_scaled = block.is_scaled
        self._block = block
        self._num_blocks = num_blocks
        self.shared = share_memory(num_blocks * block.num_bytes) if is_shared else None
        self._groups: list[_Group] = []
        of_layer: dict[int, tuple[_Group, torch.Tensor]] = {}
        at = 0
        for layers, shape in block.groups:
            part = (shape.head_bytes,) if shape.is_scaled else (shape.block_size, shape.head_dim)
            dimensions = (shape.num_layers, shape.num_kinds, num_blocks, shape.num_kv_heads, *part)
            if self.shared is None:
                all_L2BKx = torch.empty(dimensions, dtype=block.dtype, device=device)
            else:
                size = num_blocks * shape.num_bytes
                memory = self.shared.memory[at : at + size]
                all_L2BKx = torch.frombuffer(memory, dtype=block.dtype).view(dimensions)
                at += size
            group = _Group(all_L2BKx, shape)
            self._groups.append(group)
            of_layer |= {layer: (group, pair) for layer, pair in zip(layers, all_L2BKx, strict=True)}
        self._of_layer = [of_layer[layer] for layer in range(block.num_layers)]

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(k_BKSE, v_BKSE)` of a layer, writable; in 8 bits `(k_BKx, v_BKx)`, the bytes of each head's part."""
        pair = self._of_layer[layer][1]
        return pair[0], pair[-1]

    def __len__(self) -> int:
        return self._block.num_layers

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys of the first layer, values of the first layer (unless they are the keys), and so on."""
        return [tensor for layer in range(len(self)) for tensor in self[layer][: self._block.num_kinds]]

    def scaled(self, layer: int) -> tuple[ScaledSlots, ScaledSlots]:
        """Return the keys and values of a layer in 8 bits, writable, in rows: not as the CPU kernels keep keys."""
        group, pair = self._of_layer[layer]
        return ScaledSlots(*group.views(pair[0])), ScaledSlots(*group.views(pair[-1]))

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second, in every layer. All are read before any is written."""
        for group in self._groups:
            sources, destinations = torch.tensor(pairs, device=group.all_L2BKx.device).T
            group.all_L2BKx[:, :, destinations] = group.all_L2BKx[:, :, sources]

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        """Copy blocks to the host, one after the other, each with all of its layers.

        `to` has `BlockShape.num_bytes` bytes for each block; ValueError if not. On the host the copy releases the GIL
        and uses the calling thread alone; on a device it is queued in the current stream.
        """
        for mine_L2x, host_L2x in self._beside_host(blocks, to):
            if isinstance(host_L2x, np.ndarray):
                np.copyto(host_L2x, mine_L2x.numpy())
            else:
                host_L2x.copy_(mine_L2x, non_blocking=True)

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        """Copy to blocks what `read_blocks` has copied from others. Raises ValueError for memory of another size."""
        for mine_L2x, host_L2x in self._beside_host(blocks, source):
            if isinstance(host_L2x, np.ndarray):
                np.copyto(mine_L2x.numpy(), host_L2x)
            else:
                mine_L2x.copy_(host_L2x, non_blocking=True)

    def copy_from(self, cache: memoryview, sources: Sequence[int], targets: Sequence[int], copy_rows: CopyRows) -> None:
        """Copy blocks of another cache of such blocks, which this process has mapped, to blocks of this one.

        Raises ValueError for memory that is no cache, and for blocks that either has not.
        """
        num_blocks, rest = divmod(cache.nbytes, self._block.num_bytes)
        if rest or not (_are_within(num_blocks, sources) and _are_within(self._num_blocks, targets)):
            raise ValueError(f"{cache.nbytes} bytes have no such blocks of {self._block.num_bytes}")
        theirs_x, at = np.frombuffer(cache, np.uint8), 0
        for group in self._groups:
            num_rows, part_bytes = group.rows
            size = num_blocks * group.shape.num_bytes
            theirs_RBx = theirs_x[at : at + size].reshape(num_rows, num_blocks, -1)
            mine_RBx = group.bytes_L2Bx.flatten(0, 1).numpy()
            at += size
            for source, target, count in _runs(sources, targets):
                to_x, from_x = mine_RBx[0, target], theirs_RBx[0, source]
                strides = (mine_RBx.strides[0], theirs_RBx.strides[0])
                copy_rows(to_x.ctypes.data, from_x.ctypes.data, num_rows, count * part_bytes, *strides)

    def _beside_host(
        self, blocks: Sequence[int], memory: memoryview
    ) -> Iterator[tuple[torch.Tensor, npt.NDArray[np.uint8] | torch.Tensor]]:
        """Yield each block's part of a group, `[layers, 2, bytes]`, and the host's memory of it: for a cache on a
        device as a tensor."""
        if memory.nbytes != len(blocks) * self._block.num_bytes:
            raise ValueError(f"{memory.nbytes} bytes for {len(blocks)} blocks of {self._block.num_bytes}")
        at = 0
        for block in blocks:
            for group in self._groups:
                mine_L2x = group.bytes_L2Bx[:, :, block]
                host = memory[at : at + group.shape.num_bytes]
                at += group.shape.num_bytes
                if mine_L2x.is_cpu:
                    yield mine_L2x, np.frombuffer(host, np.uint8).reshape(mine_L2x.shape)
                else:
                    yield mine_L2x, torch.frombuffer(host, dtype=torch.uint8).view(mine_L2x.shape)

    @torch.inference_mode()
    def fill(self, value: float) -> None:
        """Overwrite every slot of every layer; tests fill the cache with NaN."""
        for group in self._groups:
            group.fill(value)


def _are_within(num_blocks: int, blocks: Sequence[int]) -> bool:
    return all(0 <= block < num_blocks for block in blocks)


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield where blocks that follow each other on both sides begin, and how many they are."""
    first = 0
    for end in range(1, len(sources) + 1):
        count = end - first
        if end == len(sources) or sources[end] != sources[first] + count or targets[end] != targets[first] + count:
            yield sources[first], targets[first], count
            first = end
