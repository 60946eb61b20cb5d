"""Which prompt tokens a step scores, and which scores are reported.

A token is scored by the step that computes the position before it, so the first token of a prompt never is.

What must always hold: each prompt token's scores are reported once, in order, however often the prompt is computed
(chunks, preemption, dropped steps); the scores of sampled tokens are reported with the tokens, or void with them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...messages.executor import ToScore
from ...messages.scores import StepPayloads
from .report_builder import ReportBuilder
from .sequence import Sequence


def add_prompt_scoring(asked: ToScore | None, sequence: Sequence, row: int, start: int, end: int) -> ToScore | None:
    """Add the tokens that a row computing positions `[start, end)` has to score: those not scored yet."""
    first = max(start + 1, sequence.num_scored)
    last = min(end + 1, sequence.num_prompt_tokens)
    if first >= last:
        return asked
    asked = asked or ToScore([], [], [])
    asked.rows.append(row)
    asked.positions.append(first)
    asked.token_ids.append(sequence.tokens[first:last])
    return asked


def hand_out(found: StepPayloads, sequences: Iterable[Sequence], report: ReportBuilder) -> None:
    """Report what a step yielded besides tokens for `sequences`, those that it is still current for."""
    current = {sequence.id: sequence for sequence in sequences}
    drawn = [at for at, sequence_id in enumerate(found.drawn_ids) if sequence_id in current]
    kept = [at for at, sequence_id in enumerate(found.ids) if sequence_id in current]
    for at in kept:
        current[found.ids[at]].num_scored = found.ends[at]
    if len(drawn) < len(found.drawn_ids) or len(kept) < len(found.ids):
        found = StepPayloads(
            drawn_ids=[found.drawn_ids[at] for at in drawn],
            drawn=found.drawn.pick(drawn),
            ids=[found.ids[at] for at in kept],
            ends=[found.ends[at] for at in kept],
            payloads=[found.payloads[at] for at in kept],
        )
    if drawn or kept:
        report.payloads(found)
