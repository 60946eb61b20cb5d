"""Converts a plan's rows to a backend's batch, and the tokens that the backend sampled to results by row.

Used only by the executor, which keeps a `SequenceState` for each sequence between passes.

What must always hold: a batch's rows are those of its plan, in order; a row's logit processor knows every token before
the sampled one, wherever it was computed; scores and logit changes that no request asks for are not in the batch; no
result has a token after the one that ends its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from quipu.kernels.batch import Drawn, ImageTokens, Scoring, StepBatch
from quipu.kernels.logit_processors import Processing, no_masks
from quipu.kernels.step_types import SequenceKind

from ...messages.executor import ToScore
from ...messages.scores import Scores, StepPayloads
from ...shared.scored_tokens import pack
from .grammars import MaskMaker
from .pooler import PooledRows, Pooler
from .sequence_state import SequenceState
from .step_rows import StepRows

NO_DRAFTS: Mapping[int, Sequence[int]] = {}


def make_batch(
    rows: StepRows,
    *,
    some_are_scored: bool,
    some_have_rules: bool,
    some_are_special: bool = False,
    masks: MaskMaker,
    pooler: Pooler,
    copies: Sequence[tuple[int, int]] = (),
    drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
) -> StepBatch:
    """Make the batch of a plan's rows.

    `some_are_scored`, `some_have_rules` and `some_are_special` say whether any open sequence needs scores, changed
    logits, or has a kind or an adapter; if not, the rows are not searched for them. `masks` begins to compute the
    masks of rows with grammars, also of those after each of the row's `drafts`, which `kernels/draft_rows.py` adds.
    """
    states, num_going_on = rows.states, rows.num_going_on
    token_ids = [0] * num_going_on
    if not all(rows.carried[:num_going_on]):
        token_ids = [state.tokens[start] for state, start in zip(states[:num_going_on], rows.starts, strict=False)]
    query_start = list(range(num_going_on + 1))
    images: list[ImageTokens] = []
    for state, start, end in zip(
        states[num_going_on:], rows.starts[num_going_on:], rows.ends[num_going_on:], strict=True
    ):
        images += _images_in(state, start, end, len(query_start) - 1)
        token_ids += state.tokens[start:end]
        query_start.append(len(token_ids))
    return StepBatch(
        slots=[state.slot for state in states],
        query_start=query_start,
        positions=rows.starts,
        token_ids=token_ids,
        carried=rows.carried,
        block_tables=[state.table for state in states],
        samples=rows.samples,
        sampling=[state.row_sampling for state in states],
        output_position=rows.num_outputs,
        scoring=_make_scoring(rows, query_start) if some_are_scored or rows.to_score else None,
        processing=_make_processing(rows, masks, drafts) if some_have_rules else None,
        copies=copies,
        pooling=pooler.pooling_of(rows, query_start) if some_are_special else None,
        adapters=[state.adapter for state in states] if some_are_special else None,
        images=images,
    )


def _images_in(state: SequenceState, start: int, end: int, row: int) -> Iterator[ImageTokens]:
    """Yield what a row computes of its images, from position `start` to `end`."""
    for image in state.images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            yield ImageTokens(image, first - image.start, row, first - start, last - first)


def is_special(kind: SequenceKind, adapter: str) -> bool:
    """Return whether a sequence needs more of a backend than the model's own weights and tokens."""
    return kind is not SequenceKind.GENERATE or bool(adapter)


def _make_scoring(rows: StepRows, query_start: list[int]) -> Scoring | None:
    """Return what the backend must score, or None."""
    drawn = [
        (row, state.sampling.logprobs)
        for row, (state, samples) in enumerate(zip(rows.states, rows.samples, strict=True))
        if samples and state.sampling.logprobs is not None
    ]
    prompts = rows.to_score
    if not drawn and prompts is None:
        return None
    scoring = Scoring([row for row, _ in drawn], [count for _, count in drawn], [], [], [])
    if prompts is not None:
        for row, position, token_ids in zip(prompts.rows, prompts.positions, prompts.token_ids, strict=True):
            first = query_start[row] + position - 1 - rows.starts[row]
            scoring.prompt_tokens.extend(range(first, first + len(token_ids)))
            scoring.prompt_target_ids.extend(token_ids)
            scoring.prompt_num_top.extend([rows.states[row].sampling.prompt_logprobs or 0] * len(token_ids))
    return scoring


def _make_processing(rows: StepRows, masks: MaskMaker, drafts: Mapping[int, Sequence[int]]) -> Processing | None:
    """Return the processors and masks that can change what is sampled, or None."""
    grammars = [
        (row, grammar)
        for row, (state, samples) in enumerate(zip(rows.states, rows.samples, strict=True))
        if samples and (grammar := state.sequence_grammar()) is not None
    ]
    processors = [
        (row, processor)
        for row, (state, samples) in enumerate(zip(rows.states, rows.samples, strict=True))
        if samples
        and (processor := state.logit_processor()) is not None
        and not (processor.is_idle and _draws_one(rows, row))
    ]
    if not processors and not grammars:
        return None
    followed = [drafts.get(row, ()) for row, _ in grammars]
    return Processing(
        rows=[row for row, _ in processors],
        processors=[processor for _, processor in processors],
        masked_rows=[row for row, _ in grammars],
        masks=masks.begin([grammar for _, grammar in grammars], followed) if grammars else no_masks,
    )


def _draws_one(rows: StepRows, row: int) -> bool:
    """Return whether a row yields at most one token: a rule that is inactive now cannot apply before the next pass."""
    return row >= rows.num_going_on or rows.ends[row] - rows.starts[row] == 1


@attrs.frozen
class RowTokens:
    """The tokens that rows yielded, as far as they are kept."""

    by_row: dict[int, list[int]]
    """Tokens by sampling row, in ascending order of rows; at least one each."""
    failures: dict[int, str]
    """Rows for which no token was left, with the reason."""
    broken_rows: list[int]
    """Rows for which the model computed NaN."""
    cut_rows: list[int]
    """Rows that yielded more tokens than are kept: the device's last sampled token is not their last token."""

    def without_failed(self) -> dict[int, list[int]]:
        """Return the tokens by row, without failed and broken rows."""
        if not self.failures and not self.broken_rows:
            return self.by_row
        return {r: ids for r, ids in self.by_row.items() if r not in self.failures and r not in self.broken_rows}


def tokens_by_row(rows: StepRows, batch: StepBatch, drawn: Drawn, pooled: PooledRows) -> RowTokens:
    """Return the tokens that a pass yielded, by row."""
    failures = {} if batch.processing is None else batch.processing.failures
    by_row = {row: [token_id] for row, token_id in zip(drawn.rows, drawn.token_ids, strict=True)}
    cut_rows = []
    for row, more in drawn.more.items():
        yielded = by_row[row] + more
        by_row[row] = rows.states[row].up_to_its_end(yielded)
        if len(by_row[row]) < len(yielded):
            cut_rows.append(row)
    return RowTokens(by_row, failures, drawn.broken_rows + pooled.broken_rows, cut_rows)


def payloads_of(
    rows: StepRows, batch: StepBatch, drawn: Drawn, tokens: RowTokens, pooled: PooledRows
) -> StepPayloads | None:
    """Return the rows' payloads; None if no request asks for any. Raises ValueError if the scores are missing."""
    if batch.scoring is None and not pooled.payloads:
        return None
    found = StepPayloads([], Scores.empty(), [], [], [])
    if batch.scoring is not None:
        found = _scores_of(rows, batch.scoring, drawn, tokens)
    for row, payload in pooled.payloads.items():
        found.ids.append(rows.ids[row])
        found.ends.append(rows.ends[row])
        found.payloads.append(payload)
    return found


def _scores_of(rows: StepRows, scoring: Scoring, drawn: Drawn, tokens: RowTokens) -> StepPayloads:
    if drawn.scores is None or drawn.prompt_scores is None:
        raise ValueError("the backend does not support logprobs")
    scored_rows, scores = scoring.without(drawn.broken_rows).drawn_rows, drawn.scores
    if drawn.more:
        scored_rows, kept = _kept_scores(scored_rows, drawn, tokens)
        scores = scores.pick(kept)
    found = StepPayloads([rows.ids[row] for row in scored_rows], scores, [], [], [])
    asked, start = rows.to_score or ToScore([], [], []), 0
    for row, position, token_ids in zip(asked.rows, asked.positions, asked.token_ids, strict=True):
        count = len(token_ids)
        found.ids.append(rows.ids[row])
        found.ends.append(position + count)
        # packed here, in the executor's thread, so that neither process's loop handles each number
        found.payloads.append(pack(drawn.prompt_scores.cut(start, start + count)))
        start += count
    return found


def _kept_scores(scored_rows: Sequence[int], drawn: Drawn, tokens: RowTokens) -> tuple[list[int], list[int]]:
    """Return the row and the index of each score that is kept: as many per row as it has tokens."""
    rows: list[int] = []
    kept: list[int] = []
    at = 0
    for row in scored_rows:
        num_kept = len(tokens.by_row[row])
        rows += [row] * num_kept
        kept += range(at, at + num_kept)
        at += 1 + len(drawn.more.get(row, ()))
    return rows, kept
