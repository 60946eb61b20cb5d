"""The largest pass that a server may run, so that a backend can measure its memory.

It has the maximum of rows, all drawing, and of tokens. Its rows share one block: it runs over a cache of `NUM_BLOCKS`,
before the real one is allocated. Only one row uses filters and logprobs, which are computed row by row in the same
memory: for all rows they would take longer than the rest of the start.
"""

from __future__ import annotations

from .backend import BackendConfig
from .batch import Scoring, StepBatch
from .step_types import RowSampling

NUM_BLOCKS = 2
_NUM_TOP = 20


def largest_pass(config: BackendConfig) -> StepBatch:
    """Make the pass: rows of nearly equal length, `max_num_batched_tokens` in total if the rows can hold as many."""
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
