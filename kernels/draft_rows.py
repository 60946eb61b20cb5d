"""Verifies drafts: rows of draft tokens in a batch, and what is kept of their results.

The executor expands a batch by one row for each draft token, has the backend run it like any other, and collapses the
result. A draft row feeds its token at the position after the row before it, and draws with the number that its sequence
would draw with there; a draft token is accepted if it is the token that the row before it drew.

    row          feeds the sequence's last token     draws y0
    draft row 1  feeds d1 at the next position       draws y1    yielded: y0, and y1 if d1 == y0, ...
    draft row 2  feeds d2 at the one after it        draws y2

What must always hold: the tokens, scores and failures of a collapsed result are those that single steps would give;
draft rows stand directly behind the row that they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import attrs

from .batch import Drawn, Pooling, Scoring, StepBatch
from .logit_processors import LogitProcessor, Processing

_Value = TypeVar("_Value")


@attrs.frozen
class ExpandedBatch:
    """A batch with draft rows, and how they relate to the batch without."""

    drafts: Mapping[int, Sequence[int]]
    """Draft tokens by row of the original batch; none is empty."""
    original: StepBatch
    batch: StepBatch
    """What the backend runs."""
    row_at: list[int]
    """By row of the original batch: its row in `batch`, which its draft rows follow."""

    @classmethod
    def of(cls, original: StepBatch, drafts: Mapping[int, Sequence[int]]) -> ExpandedBatch:
        """Add draft rows to a batch. The rows that they belong to feed one token and draw; blocks must have room."""
        counts = [1 + len(drafts.get(row, ())) for row in range(len(original.slots))]
        row_at = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]

        def repeated(values: Sequence[_Value]) -> list[_Value]:
            return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]

        def counted_up(values: Sequence[int]) -> list[int]:
            return [value + i for value, count in zip(values, counts, strict=True) for i in range(count)]

        starts = original.query_start
        token_ids: list[int] = []
        lengths: list[int] = []
        for row, (start, end) in enumerate(pairwise(starts)):
            token_ids += original.token_ids[start:end]
            token_ids += (draft := drafts.get(row, ()))
            lengths += [end - start, *(1 for _ in draft)]
        batch = StepBatch(
            slots=repeated(original.slots),
            query_start=[0, *accumulate(lengths)],
            positions=counted_up(original.positions),
            token_ids=token_ids,
            block_tables=repeated(original.block_tables),
            samples=repeated(original.samples),
            sampling=repeated(original.sampling),
            output_position=counted_up(original.output_position),
            carried=[
                carried and i == 0
                for carried, count in zip(original.carried, counts, strict=True)
                for i in range(count)
            ],
            scoring=None if original.scoring is None else _expand_scoring(original, original.scoring, drafts, row_at),
            processing=None if original.processing is None else _expand_rules(original.processing, drafts, row_at),
            pooling=None if original.pooling is None else _expand_pooling(original, original.pooling, drafts, row_at),
            adapters=None if original.adapters is None else repeated(original.adapters),
            copies=original.copies,
            images=[attrs.evolve(part, row=row_at[part.row]) for part in original.images],
        )
        return cls(drafts, original, batch, row_at)

    def collapse(self, drawn: Drawn) -> Drawn:
        """Return what a pass over `batch` means for the rows of the original one."""
        place = {row: at for at, row in enumerate(drawn.rows)}
        failures = {} if self.batch.processing is None else self.batch.processing.failures
        bad = {*drawn.broken_rows, *failures}
        rows = [row for row, samples in enumerate(self.original.samples) if samples]
        more: dict[int, list[int]] = {}
        for row, draft in self.drafts.items():
            at = self.row_at[row]
            accepted = 0
            while (
                accepted < len(draft)
                and at + accepted not in bad
                and at + accepted + 1 not in bad
                and drawn.token_ids[place[at + accepted]] == draft[accepted]
            ):
                accepted += 1
            if accepted:
                more[row] = [drawn.token_ids[place[at + i]] for i in range(1, accepted + 1)]
        if self.original.processing is not None:
            self.original.processing.failures.update(
                {row: failures[at] for row, at in enumerate(self.row_at) if at in failures}
            )
        broken = set(drawn.broken_rows)
        scores = drawn.scores
        if scores is not None and self.batch.scoring is not None and self.original.scoring is not None:
            scored = self.batch.scoring.without(drawn.broken_rows).drawn_rows
            place_of_score = {row: at for at, row in enumerate(scored)}
            scores = scores.pick(
                [
                    place_of_score[self.row_at[row] + i]
                    for row in self.original.scoring.drawn_rows
                    if self.row_at[row] not in broken
                    for i in range(1 + len(more.get(row, ())))
                ]
            )
        return Drawn(
            rows=rows,
            token_ids=[drawn.token_ids[place[self.row_at[row]]] for row in rows],
            more=more,
            scores=scores,
            prompt_scores=drawn.prompt_scores,
            pooled=drawn.pooled,
            broken_rows=[row for row in rows if self.row_at[row] in broken],
        )


def _expand_scoring(
    original: StepBatch, scoring: Scoring, drafts: Mapping[int, Sequence[int]], row_at: Sequence[int]
) -> Scoring:
    drawn_rows: list[int] = []
    num_top: list[int] = []
    for row, count in zip(scoring.drawn_rows, scoring.drawn_num_top, strict=True):
        for i in range(1 + len(drafts.get(row, ()))):
            drawn_rows.append(row_at[row] + i)
            num_top.append(count)
    prompt_tokens: list[int] = []
    row, shift = 0, 0
    for token in scoring.prompt_tokens:
        while token >= original.query_start[row + 1]:
            shift += len(drafts.get(row, ()))
            row += 1
        prompt_tokens.append(token + shift)
    return attrs.evolve(scoring, drawn_rows=drawn_rows, drawn_num_top=num_top, prompt_tokens=prompt_tokens)


def _expand_pooling(
    original: StepBatch, pooling: Pooling, drafts: Mapping[int, Sequence[int]], row_at: Sequence[int]
) -> Pooling:
    """Return where pooled rows, which have no drafts, and their tokens are behind the drafts of other rows."""
    shifts = list(accumulate((len(drafts.get(row, ())) for row in range(len(original.slots))), initial=0))
    return attrs.evolve(
        pooling,
        rows=[row_at[row] for row in pooling.rows],
        starts=[start + shifts[row] for row, start in zip(pooling.rows, pooling.starts, strict=True)],
    )


def _expand_rules(processing: Processing, drafts: Mapping[int, Sequence[int]], row_at: Sequence[int]) -> Processing:
    rows: list[int] = []
    processors: list[LogitProcessor] = []
    for row, processor in zip(processing.rows, processing.processors, strict=True):
        rows.append(row_at[row])
        processors.append(processor)
        for at, token_id in enumerate(drafts.get(row, ()), row_at[row] + 1):
            rows.append(at)
            processors.append(processors[-1].after([token_id]))
    return attrs.evolve(
        processing,
        rows=rows,
        processors=processors,
        masked_rows=[row_at[row] + i for row in processing.masked_rows for i in range(1 + len(drafts.get(row, ())))],
        failures={},
    )
