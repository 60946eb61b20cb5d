"""Triton's interpreter as a device, on which tests run kernels without a GPU, and tiles that a few tokens fill."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from quipu.kernels import machine
from quipu.kernels.backend import KVMemory
from quipu.kernels.machine import Memory
from quipu.kernels.triton.configs import Launch, Tiles
from quipu.kernels.triton.device import Event

SMALL = Tiles(
    chunk=16,
    keys=8,
    decode=Launch(rows=16, num_warps=4, num_stages=1),
    prefill=Launch(rows=16, num_warps=4, num_stages=1),
    prefill_wide=Launch(rows=16, num_warps=4, num_stages=1),
    programs=2,
    linear=Launch(rows=16, num_warps=4, num_stages=1),
    columns=32,
    depth=32,
    slice=64,
    adapted=Launch(rows=16, num_warps=4, num_stages=1),
    few_rows=16,
    fusion=False,
)


class CpuDevice:
    """The host, on which Triton's interpreter runs kernels: for tests, float32 only, thousands of times slower."""

    torch_device = torch.device("cpu")
    name = "the Triton interpreter"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def host_memory(self, num_bytes: int) -> memoryview:
        return torch.empty(num_bytes, dtype=torch.uint8).numpy().data

    def transfers(self) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self) -> Event:
        return _NoEvent()

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        result = work()

        def replay() -> torch.Tensor:
            return result.copy_(work())

        return replay

    def memory(self) -> Memory:
        return machine.memory()

    def held(self, num_sharing: int) -> int:
        return machine.resident()

    def peak_of(self, run: Callable[[], object]) -> int:
        return machine.peak_of(run)

    default_kv_memory = KVMemory()


class _NoEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass
