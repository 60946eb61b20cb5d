"""Time attention alone, one new token per sequence over a long context, for each dtype of the KV cache.

    python -m bench.attention [--json] [--quick] [--contexts 512 8192 32768] [--rounds 9]

Heads are those of Qwen3-0.6B. The memory of several layers is read in turn, so that no cache of the processor holds it.
A round times every dtype, one right after the other, so that all see the same machine; a row has the median of the
rounds' ratios to bfloat16. `value` is the microseconds of one layer, the best of all rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import torch

from bench.shapes import QWEN3_06B as SHAPE
from bench.timing import best_s
from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu import program
from quipu.kernels.cpu.build import load_kernels
from quipu.kernels.cpu.program import STORED_KV, Bounds, Op, Pass
from quipu.kernels.kv_cache import KV_DTYPES, BlockShape, KVCache

BLOCK_SIZE = 16
READ_BYTES = 256 << 20
"""Bytes of bfloat16 keys and values that the layers of a job have together, at least."""


def attention(
    library: ctypes.CDLL, name: str, *, context: int, num_layers: int, num_rows: int, num_threads: int
) -> Callable[[], None]:
    """Return a function that computes attention of one token of each sequence, in every layer."""
    heads, kv_heads, width = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
    dtype, per_row = KV_DTYPES[name], -(-context // BLOCK_SIZE)
    num_blocks = 1 + num_rows * per_row
    block = BlockShape(
        num_layers=num_layers, num_kv_heads=kv_heads, block_size=BLOCK_SIZE, head_dim=width, dtype=dtype
    )  # fmt: skip
    cache = KVCache(num_blocks, block)
    cache.fill(0.01)
    for layer in range(num_layers):
        for tensor in cache[layer]:
            library.quipu_large_pages(tensor.data_ptr(), tensor.nbytes)
    q_NHE, o_NHE = torch.randn(num_rows, heads, width), torch.empty(num_rows, heads, width)
    ops = (Op * num_layers)(
        *(
            Op(
                kind=program.ATTEND, stored=STORED_KV[dtype], width=width, num_heads=heads, num_kv_heads=kv_heads,
                x_stride=heads * width, y_stride=heads * width, scale=width**-0.5, x=q_NHE.data_ptr(),
                y=o_NHE.data_ptr(), keys=cache[layer][0].data_ptr(), values=cache[layer][1].data_ptr(),
            )
            for layer in range(num_layers)
        )
    )  # fmt: skip
    blocks = list(range(1, num_blocks))
    random.Random(0).shuffle(blocks)
    batch = StepBatch(
        slots=list(range(num_rows)),
        query_start=list(range(num_rows + 1)),
        positions=[context - 1] * num_rows,
        token_ids=[0] * num_rows,
        block_tables=[blocks[row * per_row : (row + 1) * per_row] for row in range(num_rows)],
        samples=[False] * num_rows,
    )
    bounds = Bounds(num_tokens=num_rows, num_logits=1, num_blocks=num_blocks, num_positions=context, vocab_size=1)
    one_pass = Pass(batch, [None] * num_rows, bounds=bounds, block_size=BLOCK_SIZE, num_threads=num_threads)

    def run(_kept: object = (cache, q_NHE, o_NHE)) -> None:
        one_pass.run(library, ops, [])

    return run


def measure(contexts: list[int], rows: list[int], rounds: int, num_threads: int, read_bytes: int) -> dict[str, Any]:
    """Time every dtype at each context and number of rows."""
    kernels = load_kernels()
    found = []
    for context in contexts:
        for num_rows in rows:
            kept = 4 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * context * num_rows
            layers = max(1, -(-read_bytes // kept))
            jobs = {
                name: attention(
                    kernels.library,
                    name,
                    context=context,
                    num_layers=layers,
                    num_rows=num_rows,
                    num_threads=num_threads,
                )
                for name in ("bfloat16", "int8")
            }
            seconds: dict[str, list[float]] = {name: [] for name in jobs}
            for job in jobs.values():  # touch all memory
                job()
            for _ in range(rounds):
                for name, job in jobs.items():
                    seconds[name].append(best_s(job, 2) / layers)
            for name, each in seconds.items():
                ratio = statistics.median(ours / plain for ours, plain in zip(each, seconds["bfloat16"], strict=True))
                row = {"name": f"{name}, {num_rows} x {context}", "value": 1e6 * min(each), "unit": "us/layer"}
                found.append({**row, "ratio": ratio})
    return {"rows": found, "instruction_set": kernels.instruction_set, "num_threads": num_threads}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: short contexts, one round")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192, 32768])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    contexts, rounds, read_bytes = arguments.contexts, arguments.rounds, READ_BYTES
    if arguments.quick:
        contexts, rounds, read_bytes = [64], 1, 1
    report = measure(contexts, arguments.sequences, rounds, arguments.threads, read_bytes)
    if arguments.json:
        print(json.dumps(report))
        return
    print(f"{report['instruction_set']}, {report['num_threads']} threads; ratios are to bfloat16")
    for row in report["rows"]:
        print(f"{row['name']:24} {row['value']:10.1f} {row['unit']} {row['ratio']:6.2f}x")


if __name__ == "__main__":
    main()
