"""What vLLM's model runner knows of each slot, and how the rows of a batch are said in its terms.

The runner keeps requests by id: tokens, how many of them are computed, a block table. A `StepBatch` has rows of slots.
`RunnerRequests` translates one into the other for `vllm_backend.py`. Nothing of vLLM is imported here.

A row that decodes and goes on exactly where the runner's request of its slot ends is that request, continued. Any other
row (a chunk, another sequence in the slot, a step that was taken back) ends the slot's request and announces a new one,
whose tokens before the row are placeholders: the model never reads them, because their KV is in the blocks.

    slot 3, known to the runner    p p p p o      table 7 9     the last o is drawn, its KV is not written
    row: slot 3, position 4, carried              table 7 9 2   continued, with block 2 appended
    row: slot 3, positions 5 to 8                 table 7 9 2   announced anew: five placeholders, then the row's tokens

A pass may be launched while the token that it carries is known to the device only. Then a row can continue a request,
but not be announced: its tokens would be needed.

What must always hold: an id is never announced twice; a slot has at most one request; what the runner has been told and
has not been told to end is in `_slots` or in `_ended`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from ..batch import StepBatch
from ..step_errors import RunnerDiverged

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
    inputs: list[list[int] | None]
    """Tokens of each row, carried ones included; None for one that only the device knows."""
    fresh_blocks: list[int]
    """Blocks whose first slot this pass writes, but not their last one."""
    announced: list[Announced]
    continued: list[Continued]
    ended: set[str]

    def rows_in_order(self, names: Sequence[str]) -> list[int]:
        """Return the row of each request. Raises RunnerDiverged unless they are those of the pass."""
        if names == self.request_ids:
            return list(range(len(names)))
        row_of = {name: row for row, name in enumerate(self.request_ids)}
        if len(names) != len(row_of) or any(name not in row_of for name in names):
            raise RunnerDiverged(f"vLLM's runner has requests {list(names)} in its batch instead of {self.request_ids}")
        return [row_of[name] for name in names]

    def flat_places(self, order: Sequence[int]) -> list[int]:
        """Return where each flat token of the batch is, if rows are in this order."""
        starts, place = {}, 0
        for row in order:
            starts[row] = place
            place += self.counts[row]
        return [starts[row] + at for row, count in enumerate(self.counts) for at in range(count)]


@attrs.define
class _Known:
    """A request as the runner knows it."""

    request_id: str
    num_tokens: int
    num_outputs: int
    table: list[int]


@attrs.define
class _LastDrawn:
    """What a slot has drawn last."""

    in_pass: int
    token_id: int | None
    """None until the pass is collected."""


class RunnerRequests:
    """The requests of one runner, by slot."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[_Known | None] = [None] * max_num_seqs
        self._last_drawn: list[_LastDrawn | None] = [None] * max_num_seqs
        self._num_passes = 0
        self._ended: set[str] = set()
        """Requests that the next message must end."""
        self._ending: set[str] = set()
        """Those that the message of the running pass ends, which the runner may not have read if the pass raises."""
        self._num_announced = 0

    def needs_tokens(self, batch: StepBatch) -> bool:
        """Return whether `begin` needs a token of a pass that has not been collected."""
        return any(
            inputs is None and not self._goes_on(batch.slots[row], batch.positions[row], None, self._table(batch, row))
            for row, inputs in enumerate(self._all_inputs(batch))
        )

    def begin(self, batch: StepBatch) -> RunnerStep:
        """Return what to tell the runner of this batch. `launched` must follow, or `forget` if the pass raises.

        Raises ValueError for a carried row whose slot has drawn nothing, or nothing that is known yet if the row has to
        be announced, before anything is changed.
        """
        inputs = self._all_inputs(batch)
        if None in inputs and self.needs_tokens(batch):
            raise ValueError("a row that has to be announced carries a token that is not known yet")
        step = RunnerStep([], [], batch.positions, [], [], inputs, [], [], [], self._ended)
        self._ending, self._ended = step.ended, set()
        for row, (slot, position, tokens) in enumerate(zip(batch.slots, batch.positions, inputs, strict=True)):
            table = self._table(batch, row)
            known = self._slots[slot]
            if known is not None and self._goes_on(slot, position, tokens, table):
                step.continued.append(
                    Continued(known.request_id, position, known.num_outputs, table[len(known.table) :])
                )
            else:
                if known is not None:
                    step.ended.add(known.request_id)
                known = self._announce(step, position, tokens or [], table)
            known.table = table
            self._slots[slot] = known
            step.request_ids.append(known.request_id)
            step.counts.append(batch.query_start[row + 1] - batch.query_start[row])
            step.num_blocks.append(len(table))
            step.last_blocks.append(table[-1])
            if self._opens_block(batch, row, table):
                step.fresh_blocks.append(table[-1])
        return step

    def launched(self, batch: StepBatch) -> int:
        """Note that the runner draws for every row that samples: it keeps these tokens itself.

        Return the number of the pass, by which `collected` will name it.
        """
        self._ending = set()
        self._num_passes += 1
        for slot, samples in zip(batch.slots, batch.samples, strict=True):
            if samples:
                self._last_drawn[slot] = _LastDrawn(self._num_passes, None)
                known = self._slots[slot]
                if known is None:
                    raise ValueError(f"slot {slot} has drawn a token and has no request")
                known.num_tokens += 1
                known.num_outputs += 1
        return self._num_passes

    def collected(self, in_pass: int, batch: StepBatch, drawn: Mapping[int, int]) -> None:
        """Note which tokens the rows of a pass have drawn."""
        for row, token_id in drawn.items():
            last = self._last_drawn[batch.slots[row]]
            if last is not None and last.in_pass == in_pass:
                last.token_id = token_id

    def forget(self) -> None:
        """End all requests with the next message: after a pass that raised, the runner's state means nothing.

        What slots have drawn is kept: a row may be repeated.
        """
        self._ended |= self._ending
        for slot, known in enumerate(self._slots):
            if known is not None:
                self._ended.add(known.request_id)
                self._slots[slot] = None

    def _table(self, batch: StepBatch, row: int) -> list[int]:
        """Return the blocks of a row. Those that are granted ahead may lie beyond what the runner has room for."""
        end = batch.positions[row] + batch.query_start[row + 1] - batch.query_start[row]
        return batch.block_tables[row][: -(-end // self._block_size)]

    def _opens_block(self, batch: StepBatch, row: int, table: list[int]) -> bool:
        """Return whether a row writes the first slot of its last block and leaves others unwritten."""
        position, size = batch.positions[row], self._block_size
        end = position + batch.query_start[row + 1] - batch.query_start[row]
        return end % size != 0 and position <= (len(table) - 1) * size

    def _all_inputs(self, batch: StepBatch) -> list[list[int] | None]:
        return [self._inputs_of(batch, row) for row in range(len(batch.slots))]

    def _inputs_of(self, batch: StepBatch, row: int) -> list[int] | None:
        begin, end = batch.query_start[row], batch.query_start[row + 1]
        if not batch.carried[row]:
            return batch.token_ids[begin:end]
        last = self._last_drawn[batch.slots[row]]
        if last is None or end - begin != 1:
            raise ValueError(f"row {row} carries slot {batch.slots[row]}, which has no single token to carry")
        return None if last.token_id is None else [last.token_id]

    def _goes_on(self, slot: int, position: int, tokens: list[int] | None, table: list[int]) -> bool:
        """Return whether a row feeds the token that the slot's request drew last, after the same blocks."""
        known, last = self._slots[slot], self._last_drawn[slot]
        return (
            known is not None
            and last is not None
            and known.num_outputs > 0
            and known.num_tokens == position + 1
            and (tokens is None or tokens == [last.token_id])
            and known.table == table[: len(known.table)]
        )

    def _announce(self, step: RunnerStep, position: int, tokens: list[int], table: list[int]) -> _Known:
        self._num_announced += 1
        request_id = str(self._num_announced)
        step.announced.append(Announced(request_id, [_PLACEHOLDER] * position + tokens, position, table))
        return _Known(request_id, position + len(tokens), 0, table)
