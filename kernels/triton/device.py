"""What the backend needs of a device besides kernels: memory, copies, graphs. Tests have another for the interpreter.

What must always hold: `capture` returns a function that repeats the same work on the same memory and reads nothing
else: whatever changes from pass to pass is in tensors that were allocated before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from ..backend import KVMemory
from ..machine import Memory

_cuda: Any = torch.cuda  # torch does not type all of it

CONTEXT_BYTES = 768 << 20
"""What a process holds of a GPU beside torch's tensors, at most: the CUDA context, loaded kernels, cuBLAS."""


class Event(Protocol):
    """A point in the device's queue of work."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Block the host until the device has passed the event. Returns at once if it was never recorded."""
        ...


class Device(Protocol):
    """Where tensors live and kernels run."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def pinned(self, size: int) -> torch.Tensor:
        """Allocate int32 zeros on the host that can be copied asynchronously."""
        ...

    def host_memory(self, num_bytes: int) -> memoryview:
        """Allocate writable memory on the host that can be copied asynchronously. Raises MemoryError."""
        ...

    def transfers(self) -> AbstractContextManager[None]:
        """Queue copies within the context beside the passes, after those queued before; wait for them at its end."""
        ...

    def event(self) -> Event: ...

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `work` to warm up, record it, and return a function that repeats it; its result is always one tensor."""
        ...

    def memory(self) -> Memory: ...

    def held(self, num_sharing: int) -> int:
        """Return how many bytes of the device's memory this process holds, one of so many that share it."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """Return the peak of additional bytes that `run` allocates."""
        ...

    @property
    def default_kv_memory(self) -> KVMemory:
        """The memory of the KV cache where the operator has not set it."""
        ...


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device, without waiting for the work that is queued there."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class CudaDevice:
    """One NVIDIA GPU."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)
        self.name = torch.cuda.get_device_name(0)
        self._pool: Any = None  # an opaque handle of torch's
        self._copies: Any = _cuda.Stream(self.torch_device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def host_memory(self, num_bytes: int) -> memoryview:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
        except RuntimeError as error:  # of CUDA
            raise MemoryError(f"{num_bytes} bytes of pinned memory: {error}") from error

    @contextmanager
    def transfers(self) -> Iterator[None]:
        # passes run on the default stream, whichever thread starts them
        self._copies.wait_stream(_cuda.default_stream(self.torch_device))
        with torch.cuda.stream(self._copies):
            yield
        self._copies.synchronize()

    def event(self) -> Event:
        event: Event = _cuda.Event()
        return event

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        # Warm up on a side stream, as capture requires: then every kernel is compiled and cuBLAS has its workspace.
        side = _cuda.Stream(self.torch_device)
        side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self.torch_device).wait_stream(side)
        torch.cuda.synchronize(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        # Graphs of one pool share memory. That is safe because only one graph runs at a time, and a pass's results are
        # read before the next graph is replayed.
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

    def held(self, num_sharing: int) -> int:
        if num_sharing > 1:  # what the others hold is theirs, and not told apart from a context's memory
            return int(torch.cuda.memory_allocated(self.torch_device)) + CONTEXT_BYTES
        memory = self.memory()
        return memory.total - memory.available  # memory of other processes counts as ours: it is not available either

    def peak_of(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        run()
        peak = torch.cuda.max_memory_allocated(self.torch_device) - before
        torch.cuda.empty_cache()
        return peak

    default_kv_memory = KVMemory(utilization=0.9)
