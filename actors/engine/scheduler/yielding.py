"""Which lines of batches give way to sequences that somebody waits for.

An admission preempts nobody, so a sequence that finds no room would wait until others end. Lines of batches return to
the queue instead, as preempted sequences do, and what they have computed mostly stays in the cache. Used by
`running.py`.

What must always hold: no more lines give way than the places and blocks need that are missing for what waits.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from .config import SchedulerConfig
from .sequence import Sequence


def lines_to_yield(
    lines: List[Sequence],
    awaited: List[Sequence],
    num_free_seqs: int,
    num_free_blocks: int,
    config: SchedulerConfig,
) -> list[Sequence]:
    """Return the first of the running `lines` that have to give way so that `awaited` can be admitted.

    Of those that wait, as many count as one step can begin. What they will find in the cache is not known here.
    """
    budget = config.max_num_batched_tokens
    missing_seqs, missing_blocks = -num_free_seqs, config.watermark_blocks - num_free_blocks
    for sequence in awaited:
        if budget <= 0:
            break
        budget -= len(sequence.tokens)
        missing_seqs += 1
        missing_blocks += -(-len(sequence.tokens) // config.block_size)
    yielding: list[Sequence] = []
    for line in lines:
        if missing_seqs <= 0 and missing_blocks <= 0:
            break
        yielding.append(line)
        missing_seqs -= 1
        missing_blocks -= -(-line.num_slots // config.block_size)
    return yielding
