"""What one forward pass runs on, as plain columns.

The executor builds a `StepBatch` from its plan; a backend turns it into whatever its device wants. No torch here, so
that a backend without torch (the fake one) stays light.

What must always hold: rows are independent sequences; row i owns tokens `query_start[i]:query_start[i+1]`, at
consecutive positions from `positions[i]`; its KV for every position up to its last one is reachable through
`block_tables[i]`; no two rows write the same physical slot.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class StepBatch:
    """One pass over R rows and N tokens."""

    slots: list[int]
    """R. A number that a sequence keeps for life (0 <= slot < max_num_seqs); state on the device is kept by it."""
    query_start: list[int]
    """R+1. Row i's tokens are `query_start[i]:query_start[i+1]` of the flat columns."""
    positions: list[int]
    """R. Position of each row's first token."""
    token_ids: list[int]
    """N. Ids to feed. A carried row has one token, and what stands here for it is ignored."""
    carried: list[bool]
    """R. True: feed the token that this slot drew in the pass before (it need not have reached the host)."""
    block_tables: list[list[int]]
    """R. Physical block of each logical block, covering every position up to the row's last one."""
    samples: list[bool]
    """R. Whether the row's last position draws a token."""
    temperature: list[float]
    """R, like the columns below; read only where `samples`. 0 is greedy."""
    top_p: list[float]
    top_k: list[int]
    """0 is off."""
    min_p: list[float]
    seed: list[int]
    """64 bits, unsigned."""
    output_position: list[int]
    """How many outputs the sequence has drawn before this one: Philox's counter."""


@attrs.frozen
class Drawn:
    """Tokens drawn by one pass."""

    rows: list[int]
    """Indexes of the rows that drew, ascending: those with `samples`."""
    token_ids: list[int]
    """One for each."""
