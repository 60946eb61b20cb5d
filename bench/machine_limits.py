"""The limits of a machine: how fast it reads memory, and how fast it multiplies. `bench/execution.py` needs them."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from bench.timing import best_s
from quipu.kernels.checkpoints.quantizing import Quantization
from quipu.kernels.cpu.build import CannotBuild, choose_instruction_set, load, processor_flags
from quipu.kernels.cpu.measure import product, quantized_product


@attrs.frozen
class LimitSizes:
    """The sizes of what is timed for the limits."""

    read_bytes: int = 1 << 30
    width: int = 1024
    columns: int = 32768


QUICK_SIZES = LimitSizes(read_bytes=1 << 22, width=128, columns=512)


def limit_jobs(
    sizes: LimitSizes, quantization: str | None, activations: str
) -> dict[str, tuple[Callable[[], object], float]]:
    """Return what to time for the limits, each with its bytes or operations."""
    read_bytes, width, columns = sizes.read_bytes, sizes.width, sizes.columns
    memory = torch.ones(read_bytes // 8, dtype=torch.int64)
    left, right = torch.randn(width, width), torch.randn(width, 4 * width)
    left_half, right_half = left[: width // 8].bfloat16(), right.bfloat16()
    operations = 8.0 * width**3
    jobs: dict[str, tuple[Callable[[], object], float]] = {
        "read, torch": (memory.sum, read_bytes),
        "products, torch float32": (lambda: left @ right, operations),
        # few rows: torch is hundreds of times slower on processors without bfloat16 instructions
        "products, torch bfloat16": (lambda: left_half @ right_half, operations / 8),
    }
    try:
        library = load(choose_instruction_set(processor_flags()))
    except CannotBuild:
        return jobs
    jobs["read, ours"] = (product(library, rows=1, width=width, columns=read_bytes // width // 2), read_bytes)
    ours = product(library, rows=96, width=width, columns=columns)
    jobs["products, ours"] = (ours, 2.0 * 96 * width * columns)
    if quantization is None:
        return jobs
    in_bytes = activations == "int8"
    layout = Quantization.parse(quantization).layout("model.layers.0.mlp.up_proj.weight", (columns, width))
    assert layout is not None, "the groups divide the width"
    ours = quantized_product(library, layout, rows=96, width=width, columns=columns, byte_products=in_bytes)
    if in_bytes:
        jobs = {name: job for name, job in jobs.items() if not name.startswith("products")}
    jobs[f"products, ours {quantization}"] = (ours, 2.0 * 96 * width * columns)
    return jobs


class Limits:
    """Measures the limits of the machine, repeatedly."""

    def __init__(self, sizes: LimitSizes, quantization: str | None, activations: str) -> None:
        self._jobs = limit_jobs(sizes, quantization, activations)
        self._slow: set[str] = set()
        self.best = dict.fromkeys(self._jobs, 0.0)
        self.measure()
        # torch's products of a type without processor support take seconds, and are not a limit
        self._slow = {name for name, rate in self.best.items() if rate < self._best_of(name) / 4}

    def _best_of(self, name: str) -> float:
        return max(rate for other, rate in self.best.items() if other.split(",")[0] == name.split(",")[0])

    def measure(self) -> dict[str, float]:
        """Return the best rate of each kind at this moment."""
        now = {"read": 0.0, "products": 0.0}
        for name, (job, amount) in self._jobs.items():
            if name not in self._slow:
                rate = amount / best_s(job, 3)
                self.best[name] = max(self.best[name], rate)
                kind = name.split(",")[0]
                now[kind] = max(now[kind], rate)
        return now
