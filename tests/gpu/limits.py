"""The roofline table: the time of each kernel and of whole steps, compared with the device's limits in the same run.

A row's floor is the larger of its bytes (each read or written once) divided by the bandwidth of a large copy, and its
operations divided by the rate of a large bfloat16 product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.step_types import RowSampling
from quipu.kernels.triton.matrices import LibraryLinear, OwnLinear
from quipu.kernels.triton.memory import Heads
from quipu.kernels.triton.ops import TritonOps
from quipu.kernels.triton.probe import make_pass, same_blocks
from quipu.kernels.triton.sampler import Sampler
from quipu.kernels.triton.triton_backend import TritonBackend
from tests.gpu.machine import Machine
from tests.gpu.models import blocks_of, make_backend, make_batch, shape_of, text


@attrs.frozen
class Rates:
    """Measured rates: bytes per second, read and written; bfloat16 operations per second."""

    bytes: float
    operations: float


def measure_rates(machine: Machine) -> Rates:
    size = 1 << 12 if machine.rehearsal else 1 << 32
    side = 32 if machine.rehearsal else 8192
    source = torch.zeros(size, dtype=torch.int8, device=machine.place)
    target = torch.empty_like(source)
    copied_s = machine.time_s(lambda: target.copy_(source), captured=False)
    left = torch.randn(side, side, dtype=torch.bfloat16, device=machine.place)
    right = torch.randn(side, side, dtype=torch.bfloat16, device=machine.place)
    multiplied_s = machine.time_s(lambda: left @ right, captured=False)
    return Rates(bytes=2 * size / copied_s, operations=2 * side**3 / multiplied_s)


def _row(name: str, took_s: float, num_bytes: float, operations: float, rates: Rates) -> dict[str, Any]:
    by_bytes, by_operations = num_bytes / rates.bytes, operations / rates.operations
    floor_s = max(by_bytes, by_operations)
    return {
        "name": name,
        "us": took_s * 1e6,
        "floor_us": floor_s * 1e6,
        "bound": "bytes" if by_bytes >= by_operations else "operations",
        "share_of_limit": floor_s / took_s,
    }


@torch.inference_mode()
def kernels(machine: Machine, rates: Rates) -> list[dict[str, Any]]:
    """Measure one layer's kernels separately, in the shape of an 8B model."""
    small = machine.rehearsal
    dtype = torch.float32 if small else torch.bfloat16
    each = dtype.itemsize
    rows: list[dict[str, Any]] = []

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=machine.place)

    def add(name: str, work: Callable[[], object], num_bytes: float, operations: float = 0.0) -> None:
        rows.append(_row(name, machine.time_s(work), num_bytes, operations, rates))

    heads = Heads(4, 2, 16) if small else Heads(32, 8, 128)
    tokens, width, mlp = (6, 64, 48) if small else (8192, 4096, 12288)
    prefill = _operations(machine, heads, [(0, 0, tokens)], dtype)
    x, y, weight = random(tokens, width), random(tokens, width), random(width)

    def add_and_norm(ops: TritonOps) -> None:
        total = ops.add(x, y)
        ops.rms_norm(total, weight, 1e-6)

    add(f"add and norm, {tokens}", lambda: add_and_norm(prefill), 4 * tokens * width * each)
    gate_up = random(tokens, 2 * mlp)
    add(f"silu and product, {tokens}", lambda: prefill.silu_mul(gate_up), 3 * tokens * mlp * each)
    q, k, v = (
        random(tokens, count, heads.head_dim) for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    heads_bytes = 2 * tokens * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim * each
    norm = random(heads.head_dim)
    rope = _rope(machine, heads.head_dim, tokens)

    def rope_and_write(ops: TritonOps) -> None:
        queries = ops.rope(ops.rms_norm(q, norm, 1e-6), rope)
        ops.write_kv(0, ops.rope(ops.rms_norm(k, norm, 1e-6), rope), v)
        ops.finish(queries)

    add(f"norm, rope, write, {tokens}", lambda: rope_and_write(prefill), heads_bytes)
    products = 4 * heads.num_heads * heads.head_dim * tokens * (tokens + 1) / 2
    add(f"prefill attention, {tokens}", lambda: prefill.attend(0, q, scale=0.1), heads_bytes, products)
    for count, context in ((2, 20),) if small else ((1, 2048), (8, 2048), (64, 2048), (64, 512)):
        decode = _operations(machine, heads, [(i, context - 1, 1) for i in range(count)], dtype)
        queries = random(count, heads.num_heads, heads.head_dim)
        kept = 2 * count * context * heads.num_kv_heads * heads.head_dim * each
        add(f"decode attention, {count} of {context}", lambda d=decode, q=queries: d.attend(0, q, scale=0.1), kept)
    for linear in (LibraryLinear(), OwnLinear(machine.tiles)):
        for count in (1, 4) if small else (1, 8, 64, 4096):
            few, matrix = random(count, width), random(2 * mlp, width)
            moved = each * (matrix.numel() + count * (width + 2 * mlp))
            add(
                f"{linear.name} product, {count} rows",
                lambda linear=linear, few=few, matrix=matrix: linear(few, matrix, None, dtype),
                moved,
                2.0 * count * matrix.numel(),
            )
    rows += _draws(machine, rates)
    return rows


def _draws(machine: Machine, rates: Rates) -> list[dict[str, Any]]:
    """Measure the sampler; its floor is one read of the logits; the host's part is included."""
    count, vocab_size = (2, 60) if machine.rehearsal else (64, 151_936)
    logits = torch.randn(count, vocab_size, device=machine.place) * 4
    rows = list(range(count))
    batch = make_batch([(i, 0, [1], [1]) for i in rows])
    sampler = Sampler(count, machine.device)
    found = []
    for name, sampling in (
        ("greedy", RowSampling()),
        ("temperature", RowSampling(temperature=1.0)),
        ("top_k 50, top_p 0.9", RowSampling(temperature=1.0, top_k=50, top_p=0.9)),
    ):
        requested = attrs.evolve(batch, sampling=[sampling] * count)
        took_s = machine.wall_s(
            lambda requested=requested: sampler.begin(requested, rows, logits, rows).read(requested, rows)
        )
        found.append(_row(f"draw {count}, {name}", took_s, 4 * logits.numel(), 0.0, rates))
    return found


def _operations(machine: Machine, heads: Heads, rows: list[tuple[int, int, int]], dtype: torch.dtype) -> TritonOps:
    """Make operations over a cache of random numbers, with separate blocks for every row."""
    longest = max(position + length for _, position, length in rows)
    per_row = -(-longest // 16)
    batch = same_blocks(rows, [0] * per_row)
    tables = [list(range(1 + i * per_row, 1 + (i + 1) * per_row)) for i in range(len(rows))]
    batch = attrs.evolve(batch, block_tables=tables)
    columns, memory = make_pass(batch, 1, 1 + len(rows) * per_row, heads, 16, machine.device, machine.tiles, dtype)
    for tensor in memory.cache[0]:
        tensor.normal_()
    return TritonOps(columns, memory, machine.tiles, LibraryLinear())


def _rope(machine: Machine, head_dim: int, num_positions: int) -> Any:
    """Make a rotary table of cosines and sines, as models have it."""

    class Table:
        angle_PR = torch.outer(torch.arange(num_positions).float(), torch.arange(head_dim // 2).float())
        cos_PR, sin_PR = angle_PR.cos(), angle_PR.sin()

    return Table()


@torch.inference_mode()
def steps(machine: Machine, rates: Rates, determinism: str) -> list[dict[str, Any]]:
    """Measure whole steps of Qwen3-0.6B through `Backend.step`, host time included."""
    backend = make_backend(machine, num_layers=28, determinism=determinism)
    shape = shape_of(machine, num_hidden_layers=28)
    longest = backend.memory_plan.max_model_len
    rows = []
    works = [("decode", 2, 20)] if machine.rehearsal else [("decode", n, 512) for n in (1, 8, 64)]
    for name, count, context in works:
        batch = make_batch([(i, context - 1, [1], blocks_of(i, longest)) for i in range(count)])
        rows.append(_step_row(machine, backend, shape, f"{name}_{count}", batch, context, rates, determinism))
    context = 30 if machine.rehearsal else 1024
    batch = make_batch([(0, 0, text(context, 1), blocks_of(0, longest))])
    rows.append(_step_row(machine, backend, shape, f"prefill_{context}", batch, context, rates, determinism))
    backend.close()
    return rows


def _step_row(
    machine: Machine, backend: TritonBackend, shape: dict[str, Any], name: str, batch: StepBatch, context: int,
    rates: Rates, determinism: str,
) -> dict[str, Any]:  # fmt: skip
    for layer in range(len(backend.cache)):
        for tensor in backend.cache[layer]:
            tensor.normal_()
    took_s = machine.wall_s(lambda: backend.step(batch))
    hidden, width, layers = shape["hidden_size"], shape["head_dim"], shape["num_hidden_layers"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    weights = layers * (hidden * width * (2 * heads + 2 * kv_heads) + 3 * hidden * shape["intermediate_size"])
    head = shape["vocab_size"] * hidden
    num_rows, num_tokens = len(batch.slots), len(batch.token_ids)
    seen = num_rows * float(np.arange(context - num_tokens // num_rows, context).sum() + num_tokens // num_rows)
    read = num_rows * (context - num_tokens // num_rows) * 4 * kv_heads * width * layers
    operations = 2 * num_tokens * weights + 4 * heads * width * seen * layers + 2 * head * num_rows
    row = _row(f"{name}, {determinism}", took_s, 2 * (weights + head) + read, operations, rates)
    return row | {"tokens_per_second": num_tokens / took_s}
