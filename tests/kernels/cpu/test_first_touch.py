"""The KV cache's memory is committed while there is nothing else to do, that of the first blocks before the others."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from quipu.kernels.cpu.build import load_kernels
from quipu.kernels.cpu.first_touch import PIECE, FirstTouch
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels

pytestmark = needs_kernels


class Memory:
    """Memory that the system has not committed yet, in pages of the smallest size."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def num_committed(self) -> int:
        """Return the number of bytes."""
        num_pages = self.tensor.nbytes // mmap.PAGESIZE
        pages = (ctypes.c_ubyte * num_pages)()
        address, length = ctypes.c_void_p(self.tensor.data_ptr()), ctypes.c_size_t(self.tensor.nbytes)
        assert ctypes.CDLL(None, use_errno=True).mincore(address, length, pages) == 0
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_pieces_side_by_side() -> None:
    """All memory is touched, a piece at a time: first the beginnings of all tensors."""
    sizes = [2 * PIECE, PIECE // 2, 2 * PIECE + mmap.PAGESIZE]
    memories = [Memory(size) for size in sizes]
    touch = FirstTouch(load_kernels().library, [memory.tensor for memory in memories])
    assert [memory.num_committed() for memory in memories] == [0, 0, 0]
    found = []
    while touch.touch_piece():
        found.append([memory.num_committed() for memory in memories])
    assert found == [
        [PIECE, 0, 0],
        [PIECE, PIECE // 2, 0],
        [PIECE, PIECE // 2, PIECE],
        [2 * PIECE, PIECE // 2, PIECE],
        [2 * PIECE, PIECE // 2, 2 * PIECE],
        sizes,
    ]
    assert not touch.touch_piece()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_contents_stay(checkpoints: dict[str, Path], kv_cache_dtype: str) -> None:
    """Touching covers the whole cache and changes none of its contents."""
    backend = make_cpu_backend(checkpoints["llama"], dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    with torch.inference_mode():
        tensors = [tensor.view(torch.uint8) for tensor in backend.cache.tensors]
        for number, tensor in enumerate(tensors):
            tensor.copy_(torch.randint(256, tensor.shape, generator=torch.Generator().manual_seed(number)))
        before = [tensor.clone() for tensor in tensors]
    num_pieces = 0
    while backend.while_idle():
        num_pieces += 1
    assert num_pieces == sum(-(-tensor.nbytes // PIECE) for tensor in tensors)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
