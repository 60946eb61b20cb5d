"""The largest pass that a server may run, for a backend to measure what it takes.

As many rows as there may be, all of them drawing, and as many tokens. Its rows share one block and its results mean
nothing: it runs before the cache is made, over one of `NUM_BLOCKS`. One row filters what it draws from and asks for
logprobs: that is done row by row in the same memory, and for all of them would take longer than the rest of a start.
Where logprobs are torch's, all of them would take their logits once more (`logits_of_all`).
"""

from __future__ import annotations

import torch

from .backend import BackendConfig
from .batch import RowSampling, Scoring, StepBatch

NUM_BLOCKS = 2
_NUM_TOP = 20


def logits_of_all(config: BackendConfig, vocab_size: int) -> torch.Tensor:
    """Memory that has been touched: what is copied where every row asks for logprobs."""
    return torch.zeros(min(config.max_num_seqs, config.max_num_batched_tokens), vocab_size)


def largest_pass(config: BackendConfig) -> StepBatch:
    """Rows as even as they come; shorter than `max_num_batched_tokens` only where no more fit into the rows."""
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
    num_rows = min(config.max_num_seqs, num_tokens)
    start = [num_tokens * row // num_rows for row in range(num_rows + 1)]
    longest = -(-num_tokens // num_rows)
    table = [NUM_BLOCKS - 1] * -(-longest // config.block_size)
    rows = list(range(num_rows))
    return StepBatch(
        slots=rows,
        query_start=start,
        positions=[0] * num_rows,
        token_ids=[0] * num_tokens,
        block_tables=[table] * num_rows,
        samples=[True] * num_rows,
        sampling=[RowSampling(temperature=1.0, top_p=0.9)] + [RowSampling()] * (num_rows - 1),
        scoring=Scoring([0], [_NUM_TOP], [], [], []),
    )
