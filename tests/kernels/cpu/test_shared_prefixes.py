"""Sequences that hold the same blocks: attention reads these once for all, and each row keeps its bits.

The baseline is as in test_invariance.py: one prompt of 520 tokens, prefilled alone.
"""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu.build import load_kernels
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.cpu.program import Bounds, Pass
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.cpu.cpu_paths import CASES, CpuPath, kernels_of
from tests.kernels.kernel_checkpoints import CPU_FORMATS
from tests.kernels.one_prompt import LENGTH, NUM_COMPARED, TOKENS, run_chunks
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

CHUNK = 256
START = LENGTH - NUM_COMPARED
NUM_BLOCKS = 500
ATTENDED = ("float32", "bfloat16", "int8-kv")
"""Formats that differ in attention."""

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it


def tables_of_sharers(num_sharers: int, block_size: int, seed: int) -> list[list[int]]:
    """Make tables of as many sequences. Each begins with blocks of an earlier one: none, some or all before START."""
    draw, per_row = random.Random(seed), -(-LENGTH // block_size)
    free = iter(scattered_blocks(per_row * num_sharers, seed=seed, num_blocks=NUM_BLOCKS - 4))
    tables = [[next(free) for _ in range(per_row)]]
    for _ in range(1, num_sharers):
        shared = draw.choice([0, 100, CHUNK, CHUNK + 30, START, START, START]) // block_size
        tables.append(draw.choice(tables)[:shared] + [next(free) for _ in range(per_row - shared)])
    return tables


def decode_together(backend: CpuBackend, tables: list[list[int]]) -> list[torch.Tensor]:
    """Feed TOKENS up to START once for each table, then the rest in all together, with other rows between them.

    Return the logits of each of the last tokens, by table. As in the server, what is shared is written once.
    """
    others = list(range(NUM_BLOCKS - 4, NUM_BLOCKS))
    written: set[int] = set()
    block_size = backend.cache.block_size
    for blocks in tables:
        own = next((i for i, block in enumerate(blocks) if block not in written), len(blocks))
        first = min(own * block_size, START)
        if first < START:
            backend.logits(make_batch({"token_ids": TOKENS[first:START], "position": first, "blocks": blocks}), [])
        written.update(blocks)
    results: list[list[torch.Tensor]] = [[] for _ in tables]
    for position in range(START, LENGTH):
        rows = [
            {"slot": 1 + i, "token_ids": [TOKENS[position]], "position": position, "blocks": blocks}
            for i, blocks in enumerate(tables)
        ]
        prefill = {"slot": 0, "token_ids": prompt(20, seed=position), "position": 0, "blocks": others}
        batch = make_batch(*rows[:1], prefill, *rows[1:])
        wanted = [batch.query_start[0], *batch.query_start[2:-1]]
        for logits, result in zip(backend.logits(batch, wanted), results, strict=True):
            result.append(logits)
    return [torch.stack(each) for each in results]


def assert_all_equal(backend: CpuBackend, cold: torch.Tensor, num_sharers: int, seed: int) -> None:
    backend.cache.fill(float("nan"))
    for result in decode_together(backend, tables_of_sharers(num_sharers, backend.cache.block_size, seed)):
        assert torch.equal(result, cold)


@pytest.mark.covering
@needs_kernels
@pytest.mark.parametrize("num_sharers", [2, 4, 9])
@pytest.mark.parametrize("numbers", ATTENDED)
@pytest.mark.parametrize("name", ["qwen3-odd", "llama", "gemma2"])
def test_sharers_match_one_prefill(checkpoints: dict[str, Path], name: str, numbers: str, num_sharers: int) -> None:
    """Match a prefill alone with any number of sequences, which share different lengths, on any number of threads."""
    backend = make_cpu_backend(checkpoints[name], num_blocks=NUM_BLOCKS, max_num_seqs=16, **CPU_FORMATS[numbers])
    cold = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    for num_threads in (1, 3):
        backend.num_threads = num_threads
        assert_all_equal(backend, cold, num_sharers, seed=num_sharers + num_threads)


@needs_kernels
@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_any_block_size(checkpoints: dict[str, Path], block_size: int) -> None:
    """Match a prefill alone, even if blocks do not divide a chunk."""
    settings = {"block_size": block_size, "num_blocks": NUM_BLOCKS, "max_num_seqs": 16}
    backend = make_cpu_backend(checkpoints["qwen3-tied"], **settings, **CPU_FORMATS["bfloat16"])
    cold = run_chunks(backend, scattered_blocks(-(-LENGTH // block_size), seed=5), [LENGTH])
    assert_all_equal(backend, cold, num_sharers=6, seed=block_size)


@pytest.mark.parametrize(("path", "numbers"), [case for case in CASES if case[1] in ATTENDED], ids=str)
def test_every_instruction_set(checkpoints: dict[str, Path], path: CpuPath, numbers: str) -> None:
    """Match a prefill alone on each instruction set."""
    backend = make_cpu_backend(
        checkpoints["qwen3-odd"],
        kernels=kernels_of(path),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=16,
        **CPU_FORMATS[numbers],
    )
    cold = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert_all_equal(backend, cold, num_sharers=7, seed=1)


@needs_kernels
@pytest.mark.parametrize("block_size", [8, 16, 24, 256])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_shared(block_size: int, seed: int) -> None:
    """Find all tokens that share a whole chunk, each next to one with which it shares the most."""
    draw = random.Random(seed)
    longest = 1200
    tables: list[list[int]] = []
    for i in range(draw.choice([2, 5, 20])):
        shared = draw.randrange(longest) // block_size if tables else 0
        own = [1 + i * 200 + j for j in range(-(-longest // block_size) - shared)]
        tables.append((draw.choice(tables)[:shared] if shared else []) + own)
    positions = [draw.randrange(longest) for _ in tables]
    lengths = [draw.choice([1, 1, 1, 2]) if position + 1 < longest else 1 for position in positions]
    found = shared_prefixes(make_pass(tables, positions, lengths, block_size))

    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    row_of = {start: i for i, start in enumerate(starts) if lengths[i] == 1}
    most = {
        token: max(
            (chunks_in_common(tables, positions, a, b, block_size) for b in row_of.values() if b != a), default=0
        )
        for token, a in row_of.items()
    }
    assert sorted(token for token, _ in found) == [token for token, common in most.items() if common]
    before = 0
    for at, (token, common) in enumerate(found):
        assert max(before, common) == most[token]
        if common:
            assert common == chunks_in_common(tables, positions, row_of[token], row_of[found[at + 1][0]], block_size)
        before = common
    assert before == 0


def chunks_in_common(tables: list[list[int]], positions: list[int], a: int, b: int, block_size: int) -> int:
    """Count the whole chunks before both positions whose blocks are the same in both tables."""
    alike = next((i for i, (x, y) in enumerate(zip(tables[a], tables[b], strict=True)) if x != y), len(tables[a]))
    return min(alike * block_size, positions[a], positions[b]) // CHUNK


def make_pass(tables: list[list[int]], positions: list[int], lengths: list[int], block_size: int) -> Pass:
    batch = StepBatch(
        slots=list(range(len(tables))),
        query_start=[sum(lengths[:i]) for i in range(len(lengths) + 1)],
        positions=positions,
        token_ids=[0] * sum(lengths),
        block_tables=tables,
        samples=[False] * len(tables),
    )
    bounds = Bounds(num_tokens=100, num_logits=1, num_blocks=10_000, num_positions=2000, vocab_size=1)
    return Pass(batch, [None] * len(tables), bounds=bounds, block_size=block_size, num_threads=1)


def shared_prefixes(of: Pass) -> list[tuple[int, int]]:
    """Return the tokens that share chunks, in order, and how many each shares with the next."""
    tokens, common = np.zeros(100, np.int64), np.zeros(100, np.int64)
    find = load_kernels().library.quipu_shared_prefixes
    find.restype = ctypes.c_int64
    count = find(ctypes.byref(of._struct), ctypes.c_void_p(tokens.ctypes.data), ctypes.c_void_p(common.ctypes.data))
    return list(zip(tokens[:count].tolist(), common[:count].tolist(), strict=True))
