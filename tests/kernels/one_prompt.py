"""Ways of computing one prompt (chunks, batches, cached prefixes), for the invariance tests of the backends."""

from __future__ import annotations

import attrs
import torch

from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

Backend = CpuBackend | ReferenceBackend

LENGTH = 520
NUM_COMPARED = 8
TOKENS = prompt(LENGTH, seed=3)


def run_chunks(backend: Backend, blocks: list[int], chunks: list[int], *, start: int = 0) -> torch.Tensor:
    """Feed TOKENS from `start` in chunks, alone. Return the logits of the last NUM_COMPARED positions."""
    results, position = [], start
    for size in chunks:
        batch = make_batch({"token_ids": TOKENS[position : position + size], "position": position, "blocks": blocks})
        wanted = [i for i in range(size) if position + i >= LENGTH - NUM_COMPARED]
        results.append(backend.logits(batch, wanted))
        position += size
    assert position == LENGTH
    return torch.cat(results)


def run_among(backend: Backend, num_others: int, chunks: list[int], *, seed: int) -> torch.Tensor:
    """Feed TOKENS in chunks, in the middle of a batch of other rows, which prefill various numbers of tokens."""
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
    for index, size in enumerate(chunks):
        row = {"token_ids": TOKENS[position : position + size], "position": position, "blocks": tables[:33]}
        place = index % (num_others + 1)
        batch = make_batch(*others[:place], row, *others[place:])
        first = batch.query_start[place]
        wanted = [first + i for i in range(size) if position + i >= LENGTH - NUM_COMPARED]
        results.append(backend.logits(batch, wanted))
        position += size
    return torch.cat(results)


def run_drafted(backend: Backend, blocks: list[int], num_others: int) -> torch.Tensor:
    """Feed the last NUM_COMPARED tokens of TOKENS in one pass, each in a row of its own, between other rows."""
    head = LENGTH - NUM_COMPARED
    backend.logits(make_batch({"token_ids": TOKENS[:head], "position": 0, "blocks": blocks[:33]}), [])
    others = [
        {
            "slot": 1 + i,
            "token_ids": prompt(1 + 9 * i, seed=i),
            "position": 0,
            "blocks": blocks[33 + 2 * i : 35 + 2 * i],
        }
        for i in range(num_others)
    ]
    rows = [
        {"token_ids": [token_id], "position": position, "blocks": blocks[:33]}
        for position, token_id in enumerate(TOKENS[head:], head)
    ]
    batch = make_batch(*others[: num_others // 2], *rows, *others[num_others // 2 :])
    first = num_others // 2
    return backend.logits(batch, [batch.query_start[first + i] for i in range(NUM_COMPARED)])


def feed_prefix(backend: Backend) -> tuple[list[int], int]:
    """Compute a prefix of TOKENS as another request, in other chunks and with a longer suffix of its own.

    Return the blocks for TOKENS, which begin with the prefix's, and the prefix's length.
    """
    prefix = 256 + 5 * 16
    shared = scattered_blocks(60, seed=9)
    backend.logits(make_batch({"position": 0, "blocks": shared[:30], "token_ids": TOKENS[:90]}), [])
    tail = TOKENS[90:prefix] + prompt(70, seed=10)
    backend.logits(make_batch({"position": 90, "blocks": shared[:30], "token_ids": tail}), [])
    return shared[: prefix // 16] + shared[30:42], prefix


def run_on_copied_block(backend: Backend) -> torch.Tensor:
    """Feed TOKENS up to the end of a block, then continue from its last token with a copy of that block.

    In the same pass the source block is itself overwritten by a copy: all sources must be read before any is written.
    """
    end = (LENGTH - NUM_COMPARED) // 16 * 16
    *first, second_last, last, own, rest = scattered_blocks(end // 16 + 2, seed=11)
    others = [*first, second_last, last]
    backend.logits(make_batch({"token_ids": TOKENS[:end], "position": 0, "blocks": others}), [])
    continuation = make_batch(
        {"token_ids": TOKENS[end - 1 :], "position": end - 1, "blocks": [*first, second_last, own, rest]}
    )
    batch = attrs.evolve(continuation, copies=[(last, own), (second_last, last)])
    return backend.logits(batch, list(range(LENGTH - end + 1))[-NUM_COMPARED:])
