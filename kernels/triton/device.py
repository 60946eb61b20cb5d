"""What the backend asks of a device besides kernels: memory, copies, graphs. CUDA's, and the CPU's for the interpreter.

What must always hold: `capture` gives a function that runs the same work again on the same memory, and reads nothing
else: whatever changes from pass to pass stands in tensors made before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from .. import machine
from ..backend import KVMemory
from ..machine import Memory

_cuda: Any = torch.cuda  # torch gives no types to part of it


class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None: ...

    def wait(self) -> None:
        """Block the host until the device is past it; at once where it was never recorded."""
        ...


class Device(Protocol):
    """Where tensors live and kernels run."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def pinned(self, size: int) -> torch.Tensor:
        """Zeros on the host, int32, that can be copied while the host goes on."""
        ...

    def event(self) -> Event: ...

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run once to warm up, record, and give back what runs it again. The result is always the same tensor."""
        ...

    def memory(self) -> Memory: ...

    def held(self) -> int:
        """Bytes of its memory that this process has."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes on top, at its highest."""
        ...

    @property
    def default_kv_memory(self) -> KVMemory:
        """How much the cache gets where nobody says."""
        ...


class CudaDevice:
    """One NVIDIA GPU."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self._pool: Any = None  # a handle that torch makes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def event(self) -> Event:
        return _CudaEvent()

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        # Beside the default stream, as capturing demands; by then every kernel is compiled and cuBLAS has its memory.
        side = _cuda.Stream(self.torch_device)
        side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self.torch_device).wait_stream(side)
        torch.cuda.synchronize(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        # Graphs of one pool share memory: fit for graphs of which one runs at a time and whose results are read before
        # another is replayed, as a pass's are.
        with _cuda.graph(graph, pool=self._pool):
            result = work()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return Memory(total, free + unused)

    def held(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return total - free - unused  # others' memory counts as ours: it is no more to be had

    def peak_of(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        run()
        peak = torch.cuda.max_memory_allocated(self.torch_device) - before
        torch.cuda.empty_cache()
        return peak

    default_kv_memory = KVMemory(utilization=0.9)


class _CudaEvent:
    def __init__(self) -> None:
        self._event = _cuda.Event()

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CpuDevice:
    """The host, where Triton's interpreter runs the kernels: for tests, float32 only, thousands of times slower."""

    torch_device = torch.device("cpu")
    name = "the Triton interpreter"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def event(self) -> Event:
        return _NoEvent()

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        result = work()

        def replay() -> torch.Tensor:
            return result.copy_(work())

        return replay

    def memory(self) -> Memory:
        return machine.memory()

    def held(self) -> int:
        return machine.resident()

    def peak_of(self, run: Callable[[], object]) -> int:
        return machine.peak_of(run)

    default_kv_memory = KVMemory()


class _NoEvent:
    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass
