"""What vLLM's model runner knows of each slot, and how the rows of a batch are said in its terms.

The runner keeps requests by id: tokens, how many of them are computed, a block table. A `StepBatch` has rows of slots.
`RunnerRequests` translates one into the other for `vllm_backend.py`. Nothing of vLLM is imported here.

A row that decodes and goes on exactly where the runner's request of its slot ends is that request, continued. Any other
row (a chunk, another sequence in the slot, a step that was taken back) ends the slot's request and announces a new one,
whose tokens before the row are placeholders: the model never reads them, because their KV is in the blocks.

    slot 3, known to the runner    p p p p o      table 7 9     the last o is drawn, its KV is not written
    row: slot 3, position 4, carried              table 7 9 2   continued, with block 2 appended
    row: slot 3, positions 5 to 8                 table 7 9 2   announced anew: five placeholders, then the row's tokens

What must always hold: an id is never announced twice; a slot has at most one request; what the runner has been told and
has not been told to end is in `_slots` or in `_ended`.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..batch import StepBatch

_PLACEHOLDER = 0


@attrs.frozen
class Announced:
    """A request that the runner does not know yet."""

    request_id: str
    prompt_token_ids: list[int]
    """Placeholders for the tokens before the row, then the row's."""
    num_computed: int
    """Tokens whose KV is in the blocks: as many as there are placeholders."""
    table: list[int]


@attrs.frozen
class Continued:
    """A request whose next input is the token that the runner drew last."""

    request_id: str
    num_computed: int
    num_outputs: int
    """Tokens that the runner has drawn since the request was announced."""
    new_blocks: list[int]


@attrs.frozen
class RunnerStep:
    """One pass in the runner's terms. Columns are by row of the batch."""

    request_ids: list[str]
    counts: list[int]
    """Tokens of each row."""
    positions: list[int]
    num_blocks: list[int]
    """Blocks of each row's table that the runner must know by now."""
    last_blocks: list[int]
    """The last of them."""
    inputs: list[list[int]]
    """Tokens of each row, carried ones included."""
    fresh_blocks: list[int]
    """Blocks whose first slot this pass writes."""
    announced: list[Announced]
    continued: list[Continued]
    ended: set[str]


@attrs.define
class _Known:
    """A request as the runner knows it."""

    request_id: str
    num_tokens: int
    num_outputs: int
    table: list[int]


class RunnerRequests:
    """The requests of one runner, by slot."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[_Known | None] = [None] * max_num_seqs
        self._last_drawn: list[int | None] = [None] * max_num_seqs
        self._ended: set[str] = set()
        """Requests that the next message must end."""
        self._ending: set[str] = set()
        """Those that the message of the running pass ends, which the runner may not have read if the pass raises."""
        self._num_announced = 0

    def begin(self, batch: StepBatch) -> RunnerStep:
        """Return what to tell the runner of this batch. `end` must follow, or `forget` if the pass raises.

        Raises ValueError for a carried row whose slot has drawn nothing, before anything is changed.
        """
        inputs = [self._inputs_of(batch, row) for row in range(len(batch.slots))]
        step = RunnerStep([], [], batch.positions, [], [], inputs, [], [], [], self._ended)
        self._ending, self._ended = step.ended, set()
        for row, (slot, position, tokens) in enumerate(zip(batch.slots, batch.positions, inputs, strict=True)):
            # blocks that are granted ahead may lie beyond what the runner has room for
            table = batch.block_tables[row][: -(-(position + len(tokens)) // self._block_size)]
            known = self._slots[slot]
            if known is not None and self._goes_on(slot, known, position, tokens, table):
                step.continued.append(
                    Continued(known.request_id, position, known.num_outputs, table[len(known.table) :])
                )
            else:
                if known is not None:
                    step.ended.add(known.request_id)
                known = self._announce(step, position, tokens, table)
            known.table = table
            self._slots[slot] = known
            step.request_ids.append(known.request_id)
            step.counts.append(len(tokens))
            step.num_blocks.append(len(table))
            step.last_blocks.append(table[-1])
            step.fresh_blocks.extend(table[-(-position // self._block_size) :])
        return step

    def end(self, batch: StepBatch, drawn: Mapping[int, int]) -> None:
        """Note what the runner has drawn, by row: it keeps these tokens itself."""
        self._ending = set()
        for row, token_id in drawn.items():
            slot = batch.slots[row]
            self._last_drawn[slot] = token_id
            known = self._slots[slot]
            if known is None:
                raise ValueError(f"slot {slot} has drawn a token and has no request")
            known.num_tokens += 1
            known.num_outputs += 1

    def forget(self) -> None:
        """End all requests with the next message: after a pass that raised, the runner's state means nothing.

        What slots have drawn is kept: a row may be repeated.
        """
        self._ended |= self._ending
        for slot, known in enumerate(self._slots):
            if known is not None:
                self._ended.add(known.request_id)
                self._slots[slot] = None

    def _inputs_of(self, batch: StepBatch, row: int) -> list[int]:
        begin, end = batch.query_start[row], batch.query_start[row + 1]
        if not batch.carried[row]:
            return batch.token_ids[begin:end]
        last = self._last_drawn[batch.slots[row]]
        if last is None or end - begin != 1:
            raise ValueError(f"row {row} carries slot {batch.slots[row]}, which has no single token to carry")
        return [last]

    def _goes_on(self, slot: int, known: _Known, position: int, tokens: list[int], table: list[int]) -> bool:
        """Return whether a row feeds the token that the slot's request drew last, after the same blocks."""
        return (
            known.num_outputs > 0
            and known.num_tokens == position + 1
            and len(tokens) == 1
            and tokens[0] == self._last_drawn[slot]
            and known.table == table[: len(known.table)]
        )

    def _announce(self, step: RunnerStep, position: int, tokens: list[int], table: list[int]) -> _Known:
        self._num_announced += 1
        request_id = str(self._num_announced)
        step.announced.append(Announced(request_id, [_PLACEHOLDER] * position + tokens, position, table))
        return _Known(request_id, position + len(tokens), 0, table)
