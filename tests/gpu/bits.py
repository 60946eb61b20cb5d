"""Check batch invariance: which results do not depend on the batch.

(i) Are the rows of a cuBLAS product bit-identical for every number of rows, with the settings that forbid split-K? (ii)
Are a token's bits the same from the decode kernel as from the prefill kernel? And does the strict mode, which checks
both at start-up, keep its guarantee in whole passes?
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import attrs
import torch

from quipu.kernels.triton.configs import shared_tile, token_ladder
from quipu.kernels.triton.matrices import LibraryLinear, Linear, OwnLinear
from quipu.kernels.triton.memory import Heads
from quipu.kernels.triton.probe import AttentionKind, attention_is_invariant
from tests.gpu.machine import Machine
from tests.gpu.models import blocks_of, make_backend, make_batch, one_row, several_rows, text
from tests.gpu.random_adapter import save_adapter

# (in, out) of the matrices of Qwen3-0.6B and of an 8B model
SHAPES = [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (4096, 6144), (4096, 24576), (12288, 4096)]
MOST_ROWS = 4096
HEADS = {
    "16/8 heads of 128": (Heads(16, 8, 128), AttentionKind(128**-0.5, None, None)),
    "32/8 heads of 128": (Heads(32, 8, 128), AttentionKind(128**-0.5, None, None)),
    "32/32 heads of 128": (Heads(32, 32, 128), AttentionKind(128**-0.5, None, None)),
    "24/8 heads of 96": (Heads(24, 8, 96), AttentionKind(96**-0.5, None, None)),
    "8/4 heads of 256, window, soft cap": (Heads(8, 4, 256), AttentionKind(256**-0.5, 300, 50.0)),
    "64/8 heads of 64, window, sinks": (Heads(64, 8, 64), AttentionKind(0.125, 128, None, True)),
}


def products(machine: Machine) -> list[dict[str, Any]]:
    """Count, for each shape, the numbers of rows for which the first rows' bits differ from those in the largest."""
    rows = []
    shapes, most = ([(48, 40)], 24) if machine.rehearsal else (SHAPES, MOST_ROWS)
    dtype = torch.float32 if machine.rehearsal else torch.bfloat16
    for num_in, num_out in shapes:
        weight = torch.randn(num_out, num_in, dtype=dtype, device=machine.place)
        x = torch.randn(most, num_in, dtype=dtype, device=machine.place)
        for linear, counts in (
            (LibraryLinear(), list(range(1, most + 1))),
            (OwnLinear(machine.tiles), token_ladder(most)),
        ):
            differing = _differing_counts(linear, x, weight, counts)
            rows.append(
                {
                    "question": "(i) rows of a product",
                    "what": f"{linear.name}, {num_in} to {num_out}",
                    "asked": len(counts),
                    "unlike": len(differing),
                    "first_unlike": differing[:8],
                    "alike": not differing,
                }
            )
    return rows


def _differing_counts(linear: Linear, x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> list[int]:
    whole = linear(x, weight, None, x.dtype)
    differs = [(linear(x[:count], weight, None, x.dtype) != whole[:count]).any() for count in counts]
    return [count for count, differing in zip(counts, torch.stack(differs).tolist(), strict=True) if differing]


def attention(machine: Machine) -> list[dict[str, Any]]:
    """Compare, for each shape, a prompt in one piece, in chunks and token by token; with its own tile and decode's."""
    rows = []
    dtype = torch.float32 if machine.rehearsal else torch.bfloat16
    cases = {"4/2 heads of 16": (Heads(4, 2, 16), AttentionKind(0.25, 9, 3.0, True))} if machine.rehearsal else HEADS
    for name, (heads, kind) in cases.items():
        for what, tiles in (("own tile", machine.tiles), ("decode's tile", shared_tile(machine.tiles))):
            alike = attention_is_invariant(kind, heads, 16, machine.device, tiles, dtype)
            rows.append({"question": "(ii) decode and prefill", "what": f"{name}, {what}", "alike": alike})
    return rows


def passes(machine: Machine) -> list[dict[str, Any]]:
    """Compare the last positions' logits of a strict backend, computed in six ways."""
    backend = make_backend(machine, determinism="strict")
    length, num_compared = (20, 2) if machine.rehearsal else (700, 8)
    cold = one_row(backend, length, num_compared, [length])
    rows = []
    ways = {
        "again": one_row(backend, length, num_compared, [length]),
        "chunks": one_row(backend, length, num_compared, [length // 3, length - length // 3]),
        "token by token": one_row(backend, length, num_compared, [length - num_compared, *[1] * num_compared]),
    }
    for others in (1,) if machine.rehearsal else (1, 7, 30):
        ways[f"beside {others} others"] = several_rows(backend, length, num_compared, others)
    for name, logits in ways.items():
        rows.append(
            {
                "question": "strict passes",
                "what": name,
                "alike": torch.equal(logits, cold),
                "largest_difference": (logits - cold).abs().max().item(),
                "kernels": str(backend.strict_kernels),
            }
        )
    backend.close()
    return rows + adapted_rows(machine)


def adapted_rows(machine: Machine) -> list[dict[str, Any]]:
    """Compare the logits of a strict backend's rows with and without an adapter: alone and together."""
    adapted, plain = (make_backend(machine, determinism="strict", max_loras=count) for count in (3, 0))
    with tempfile.TemporaryDirectory() as folder:
        linear = adapted.named_weights.linear
        digests = [
            adapted.load_adapter(save_adapter(Path(folder, str(seed)), linear, rank=rank, seed=seed))
            for seed, rank in enumerate((16, 4))
        ]
    longest = adapted.memory_plan.max_model_len
    lengths = (7, 1, 2) if machine.rehearsal else (300, 1, 17, 40, 1, 1, 90, 3)
    texts = [(slot, 0, text(length, slot), blocks_of(slot, longest)) for slot, length in enumerate(lengths)]
    chosen = [["", *digests][slot % 3] for slot in range(len(lengths))]
    together = attrs.evolve(make_batch(texts), adapters=chosen)
    found = adapted.logits(together, [end - 1 for end in together.query_start[1:]])
    rows = []
    for slot, one in enumerate(texts):
        batch = make_batch([(0, *one[1:])])
        if chosen[slot]:
            alone = adapted.logits(attrs.evolve(batch, adapters=[chosen[slot]]), [lengths[slot] - 1])
        else:
            alone = plain.logits(batch, [lengths[slot] - 1])
        what = "a row with an adapter" if chosen[slot] else "a row without, beside rows with adapters"
        alike = torch.equal(alone[0], found[slot])
        rows.append({"question": "strict passes", "what": f"{what}, {lengths[slot]} tokens", "alike": alike})
    adapted.close()
    plain.close()
    return rows
