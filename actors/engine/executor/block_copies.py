"""Copies of blocks that have the contents which a row would compute. Used by `step_runner.py`.

What must always hold: a copy is made only of a block whose tag says that it has these contents.
"""

from __future__ import annotations

import attrs

from ...messages.executor import StepPlan
from ...shared.block_keys import chain_image_keys
from .block_tags import BlockTags
from .step_rows import StepRows


@attrs.frozen
class BlockCopy:
    """A block with the contents that a row would write, and the row's own block, which becomes a copy of it."""

    source: int
    destination: int
    num_tokens: int
    """Number of tokens that need not be computed: all but the last one, whose logits are needed."""


def confirmed_copies(
    tags: BlockTags, plan: StepPlan, rows: StepRows, read: list[int], block_size: int
) -> dict[int, BlockCopy]:
    """Return, by sequence, the copy sources whose tags match the contents that the row would compute.

    Must be called before the tags of this pass are cleared: a source may be a block that the pass writes.
    """
    row_of = {sequence_id: row for row, sequence_id in enumerate(plan.row_ids)}
    copies = {}
    for admit, num_read in zip(plan.admitted, read, strict=True):
        if not admit.copy_source:
            continue
        row = row_of[admit.sequence_id]
        state, start, end = rows.states[row], rows.starts[row], rows.ends[row]
        if num_read == start and end - start == block_size:
            (key,) = chain_image_keys(state.keys[-1], state.tokens[start:end], block_size, state.images, start)
            if tags.contains(admit.copy_source, key):
                destination = state.table[start // block_size]
                copies[admit.sequence_id] = BlockCopy(admit.copy_source, destination, block_size - 1)
    return copies
