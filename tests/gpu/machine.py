"""The GPU that `make gpu` runs on and how it is timed, or Triton's interpreter for a rehearsal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch

from quipu.kernels.triton.configs import Tiles, tiles_for
from quipu.kernels.triton.device import CudaDevice, Device
from tests.triton_kernels.interpreter import SMALL, CpuDevice

_FLUSHED_BYTES = 256 << 20
"""More than any cache: written between two timings, so that each starts with cold caches."""


@attrs.frozen
class Machine:
    """The device to measure."""

    device: Device
    tiles: Tiles
    rehearsal: bool

    @property
    def place(self) -> torch.device:
        return self.device.torch_device

    def describe(self) -> dict[str, Any]:
        import triton

        about = {"device": self.device.name, "torch": torch.__version__, "triton": triton.__version__}
        if self.rehearsal:
            return about | {"rehearsal": True}
        properties: Any = torch.cuda.get_device_properties(self.place)
        return about | {
            "capability": list(torch.cuda.get_device_capability(self.place)),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }

    def time_s(self, work: Callable[[], object], *, captured: bool = True, repeats: int = 20) -> float:
        """Return the median seconds of one run with cold caches; `captured` runs it as a CUDA graph."""
        if self.rehearsal:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        for _ in range(3):
            work()
        run = work
        if captured:
            run = self.device.capture(lambda: _run(work, self.place))
        flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=self.place)
        cuda: Any = torch.cuda
        times = []
        for _ in range(repeats):
            flushed.zero_()
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return float(statistics.median(times))

    def wall_s(self, work: Callable[[], object], repeats: int = 20) -> float:
        """Return the median seconds of one run as the host sees it, until the device is done."""
        times = []
        for _ in range(1 if self.rehearsal else repeats + 3):
            self.synchronize()
            started = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[-repeats:])

    def synchronize(self) -> None:
        if not self.rehearsal:
            torch.cuda.synchronize(self.place)


def _run(work: Callable[[], object], place: torch.device) -> torch.Tensor:
    work()
    return torch.empty(0, device=place)


def this_machine(*, rehearsal: bool) -> Machine:
    """Start CUDA, with the environment variables that the strict mode needs."""
    if rehearsal:
        from tests.gpu import interpreted

        interpreted.interpreter.InterpreterBuilder.create_dot = interpreted.create_dot
        return Machine(CpuDevice(), SMALL, rehearsal=True)
    from quipu.kernels.triton.availability import check_capability, request_strict_cublas

    if not request_strict_cublas():
        raise RuntimeError("CUDA was started before cuBLAS was configured")
    check_capability()
    return Machine(CudaDevice(), tiles_for(torch.cuda.get_device_capability()), rehearsal=False)
