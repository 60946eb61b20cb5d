"""The limits of a machine: how fast it reads memory, and how fast it multiplies. `bench/execution.py` needs them."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from bench.cpu_products import product, products_in_registers, quantized_product
from bench.timing import best_s
from quipu.kernels.checkpoints.quantizing import Quantization
from quipu.kernels.cpu.build import CannotBuild, choose_instruction_set, load, processor_flags

Job = tuple[Callable[[], object], float]
"""What to time, and its bytes or operations."""


@attrs.frozen
class LimitSizes:
    """The sizes of what is timed for the limits."""

    read_bytes: int = 1 << 30
    width: int = 1024
    columns: int = 32768
    many_rows: int = 1024
    """Rows of the products that are larger than others, by an eighth of the columns."""


QUICK_SIZES = LimitSizes(read_bytes=1 << 22, width=128, columns=512, many_rows=128)


def limit_jobs(sizes: LimitSizes, quantization: str | None, activations: str) -> dict[str, Job]:
    """Return what to time for the limits."""
    in_bytes = quantization is not None and activations == "int8"
    memory = torch.ones(sizes.read_bytes // 8, dtype=torch.int64)
    jobs: dict[str, Job] = {"read, torch": (memory.sum, sizes.read_bytes)}
    if not in_bytes:  # no other product is of bytes
        jobs |= _torch_products(sizes)
    try:
        library = load(choose_instruction_set(processor_flags()))
    except CannotBuild:
        return jobs
    # one row of a matrix, on all threads and in large pages, as a step reads its weights
    row = product(library, rows=1, width=sizes.width, columns=sizes.read_bytes // sizes.width // 2)
    jobs["read, ours"] = (row, sizes.read_bytes)
    in_registers = products_in_registers(library, byte_products=in_bytes)
    if in_registers is not None:
        jobs["products, in registers"] = in_registers
    for rows, columns in ((96, sizes.columns), (sizes.many_rows, sizes.columns // 8)):
        shape, operations = {"rows": rows, "width": sizes.width, "columns": columns}, 2.0 * rows * sizes.width * columns
        if not in_bytes:
            jobs[f"products, ours, {rows} rows"] = (product(library, **shape), operations)
        if quantization is not None:
            weight = "model.layers.0.mlp.up_proj.weight"
            layout = Quantization.parse(quantization).layout(weight, (columns, sizes.width))
            assert layout is not None, "the groups divide the width"
            ours = quantized_product(library, layout, **shape, byte_products=in_bytes)
            jobs[f"products, ours {quantization}, {rows} rows"] = (ours, operations)
    return jobs


def _torch_products(sizes: LimitSizes) -> dict[str, Job]:
    """Return torch's products; with many rows in bfloat16 only where the processor multiplies it."""
    left, right = torch.randn(sizes.many_rows, sizes.width), torch.randn(sizes.width, sizes.columns // 8)
    left_half, right_half = left.bfloat16(), right.bfloat16()
    few = sizes.many_rows // 8  # torch is hundreds of times slower on processors without bfloat16 instructions
    operations = 2.0 * sizes.width * right.shape[1]
    jobs: dict[str, Job] = {
        "products, torch float32": (lambda: left @ right, operations * len(left)),
        f"products, torch bfloat16, {few} rows": (lambda: left_half[:few] @ right_half, operations * few),
    }
    rates = [amount / best_s(job, 2) for job, amount in jobs.values()]
    if rates[1] > rates[0] / 2:
        jobs[f"products, torch bfloat16, {len(left)} rows"] = (lambda: left_half @ right_half, operations * len(left))
    return jobs


@attrs.frozen
class Rates:
    """What the machine reached at one moment."""

    read: float
    """Bytes per second."""
    products: float
    """Operations per second."""
    product: str
    """The product that reached them."""

    def better(self, other: Rates) -> Rates:
        """Return the better rate of each kind."""
        best = max(self, other, key=lambda rates: rates.products)
        return Rates(max(self.read, other.read), best.products, best.product)


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

    def measure(self) -> Rates:
        """Return the best rate of each kind at this moment."""
        now = Rates(0.0, 0.0, "")
        for name, (job, amount) in self._jobs.items():
            if name not in self._slow:
                rate = amount / best_s(job, 3)
                self.best[name] = max(self.best[name], rate)
                kind, what = name.split(", ", 1)
                now = now.better(Rates(rate, 0.0, "") if kind == "read" else Rates(0.0, rate, what))
        return now
