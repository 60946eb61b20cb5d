"""One prompt, fed in whatever chunks: what the invariance tests of both backends compare."""

from __future__ import annotations

import attrs
import torch

from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.kernel_checkpoints import make_batch, prompt, scattered_blocks

Backend = CpuBackend | ReferenceBackend

LENGTH = 520
LOOKED_AT = 8
TOKENS = prompt(LENGTH, seed=3)


def run_chunks(backend: Backend, blocks: list[int], chunks: list[int], *, start: int = 0) -> torch.Tensor:
    """Feed TOKENS from `start` in chunks, alone; logits of the last LOOKED_AT positions."""
    results, position = [], start
    for size in chunks:
        batch = make_batch({"token_ids": TOKENS[position : position + size], "position": position, "blocks": blocks})
        wanted = [i for i in range(size) if position + i >= LENGTH - LOOKED_AT]
        results.append(backend.logits(batch, wanted))
        position += size
    assert position == LENGTH
    return torch.cat(results)


def run_among(backend: Backend, num_others: int, chunks: list[int], *, seed: int) -> torch.Tensor:
    """Feed TOKENS in chunks in the middle of other rows, which prefill odd numbers of tokens."""
    tables = scattered_blocks(33 + 2 * num_others, seed=seed)
    others = [
        {
            "slot": 1 + i,
            "token_ids": prompt(1 + 7 * i % 32, seed=i),
            "position": 0,
            "blocks": tables[33 + 2 * i : 35 + 2 * i],
        }
        for i in range(num_others)
    ]
    results, position = [], 0
    for turn, size in enumerate(chunks):
        row = {"token_ids": TOKENS[position : position + size], "position": position, "blocks": tables[:33]}
        cut = turn % (num_others + 1)
        batch = make_batch(*others[:cut], row, *others[cut:])
        first = batch.query_start[cut]
        wanted = [first + i for i in range(size) if position + i >= LENGTH - LOOKED_AT]
        results.append(backend.logits(batch, wanted))
        position += size
    return torch.cat(results)


def feed_prefix(backend: Backend) -> tuple[list[int], int]:
    """Have another request compute the first tokens, in other chunks and with a longer tail of its own.

    Gives the blocks with which TOKENS go on behind them, and how many they are.
    """
    prefix = 256 + 5 * 16
    shared = scattered_blocks(60, seed=9)
    backend.logits(make_batch({"position": 0, "blocks": shared[:30], "token_ids": TOKENS[:90]}), [])
    tail = TOKENS[90:prefix] + prompt(70, seed=10)
    backend.logits(make_batch({"position": 90, "blocks": shared[:30], "token_ids": tail}), [])
    return shared[: prefix // 16] + shared[30:42], prefix


def run_upon_copy(backend: Backend) -> torch.Tensor:
    """Feed TOKENS up to the end of a block; then go on, with its last token, upon a copy of that block.

    In the same pass the block that was copied becomes another one's copy: all are read before any is written.
    """
    end = (LENGTH - LOOKED_AT) // 16 * 16
    *first, second_last, last, own, rest = scattered_blocks(end // 16 + 2, seed=11)
    others = [*first, second_last, last]
    backend.logits(make_batch({"token_ids": TOKENS[:end], "position": 0, "blocks": others}), [])
    going_on = make_batch(
        {"token_ids": TOKENS[end - 1 :], "position": end - 1, "blocks": [*first, second_last, own, rest]}
    )
    batch = attrs.evolve(going_on, copies=[(last, own), (second_last, last)])
    return backend.logits(batch, list(range(LENGTH - end + 1))[-LOOKED_AT:])
