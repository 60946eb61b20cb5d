"""Converts a plan to a backend's batch, and a backend's scores to the scheduler's.

Used by the executor only, which keeps a `SequenceState` for each sequence between passes.

What must always hold: a batch's rows are those of its plan, in order; a row's logit processor knows every token before
the one that is sampled, whoever computed them; scores and logit changes that no request asks for are not in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import msgspec

from quipu.kernels.batch import Drawn, Scoring, StepBatch
from quipu.kernels.logit_processors import LogitProcessor, Processing, no_masks
from quipu.kernels.step_types import RowSampling

from ...messages.executor import StepPlan
from ...messages.sampling import SamplingParams
from ...messages.scores import StepScores
from ...shared.scored_tokens import pack
from .grammars import MaskMaker
from .sequence_grammar import SequenceGrammar


def changes_logits(sampling: SamplingParams) -> bool:
    """Return whether a sequence's logits may be changed before a token is drawn."""
    return sampling.rules is not None or sampling.grammar is not None


@attrs.define(eq=False)
class SequenceState:
    """What the executor keeps about a sequence between passes."""

    slot: int
    sampling: SamplingParams
    num_outputs: int
    """Outputs sampled so far, by this admission and earlier ones."""
    keys: list[bytes]
    """Chain keys of its full blocks, preceded by the root key."""
    tokens: list[int]
    """Token ids from position 0 on that have been fed, or will be."""
    table: list[int] = attrs.field(factory=list)
    processor: LogitProcessor | None = None
    """Created at its first sampled token if its sampling has rules; from then on given every token."""
    grammar: SequenceGrammar | None = None
    """Created and kept like `processor`, if its output has to match a grammar."""
    row_sampling: RowSampling = attrs.field(init=False)
    """Its sampling parameters for every batch: made once, shared by all its rows."""

    @row_sampling.default
    def _make_row_sampling(self) -> RowSampling:
        # A top_p of 0 leaves the likeliest token alone; backends need not know it.
        return self.sampling if self.sampling.top_p else attrs.evolve(self.sampling, temperature=0.0, top_p=1.0)

    def logit_processor(self) -> LogitProcessor | None:
        """Return what changes its logits, if its sampling has rules. All tokens before the next one must be known."""
        rules = self.sampling.rules
        if rules is None:
            return None
        if self.processor is None:
            num_prompt_tokens = len(self.tokens) - self.num_outputs
            self.processor = LogitProcessor(rules, self.tokens[:num_prompt_tokens], self.tokens[num_prompt_tokens:])
        return self.processor

    def sequence_grammar(self) -> SequenceGrammar | None:
        """Return what masks its logits, if its output has to match a grammar. All tokens must be known, likewise."""
        if self.grammar is None and self.sampling.grammar is not None:
            outputs = self.tokens[len(self.tokens) - self.num_outputs :]
            self.grammar = SequenceGrammar(self.sampling.grammar, outputs, ends_early=not self.sampling.ignore_eos)
        return self.grammar

    def take_back(self, start: int, end: int, *, is_fed: bool, block_size: int) -> None:
        """Forget a pass over the positions from `start` to `end`, and a token drawn by it.

        `is_fed`: whether the tokens there came with its plan; otherwise the last pass drew them, and they stay.
        """
        del self.keys[1 + start // block_size :]
        num_drawn = max(0, len(self.tokens) - end)
        if num_drawn:
            self.num_outputs -= num_drawn
            self.processor = self.grammar = None  # made again from the tokens
        del self.tokens[start if is_fed else end :]

    def append_output(self, token_id: int) -> None:
        """Record a sampled token."""
        self.tokens.append(token_id)
        self.num_outputs += 1
        if self.processor is not None:
            self.processor.add_output(token_id)
        if self.grammar is not None:
            self.grammar.add_output(token_id)


@attrs.frozen
class BlockCopy:
    """A block that contains what a row would write, and the row's own block, which becomes a copy of it."""

    source: int
    destination: int
    num_tokens: int
    """Tokens that need not be computed: all but the last, whose logits are needed."""


def skip_copied(plan: StepPlan, copies: Mapping[int, BlockCopy]) -> StepPlan:
    """Return the plan without the tokens that are copied. `copies` are by sequence."""
    starts, counts, token_ids = list(plan.row_starts), list(plan.row_counts), list(plan.row_token_ids)
    for row, sequence_id in enumerate(plan.row_ids):
        if (copy := copies.get(sequence_id)) is not None:
            starts[row] += copy.num_tokens
            counts[row] -= copy.num_tokens
            token_ids[row] = token_ids[row][copy.num_tokens :]
    return msgspec.structs.replace(plan, row_starts=starts, row_counts=counts, row_token_ids=token_ids)


def make_batch(
    plan: StepPlan,
    states: Sequence[SequenceState],
    *,
    some_are_scored: bool,
    some_have_rules: bool,
    masks: MaskMaker,
    copies: Sequence[tuple[int, int]] = (),
) -> StepBatch:
    """Make the batch of a plan. `states` are its rows' sequences.

    `some_are_scored` and `some_have_rules` say whether any open sequence needs scores or changed logits; without them
    the rows are not searched for any. `masks` begins to make the masks of rows with grammars.
    """
    token_ids: list[int] = []
    query_start = [0]
    for row_tokens in plan.row_token_ids:
        token_ids += row_tokens or (0,)
        query_start.append(len(token_ids))
    return StepBatch(
        slots=[state.slot for state in states],
        query_start=query_start,
        positions=plan.row_starts,
        token_ids=token_ids,
        carried=[not row_tokens for row_tokens in plan.row_token_ids],
        block_tables=[state.table for state in states],
        samples=plan.row_samples,
        sampling=[state.row_sampling for state in states],
        output_position=[state.num_outputs for state in states],
        scoring=_make_scoring(plan, states, query_start) if some_are_scored or plan.to_score else None,
        processing=_make_processing(plan, states, masks) if some_have_rules else None,
        copies=copies,
    )


def _make_scoring(plan: StepPlan, states: Sequence[SequenceState], query_start: list[int]) -> Scoring | None:
    """Return what the backend must score, or None."""
    drawn = [
        (row, state.sampling.logprobs)
        for row, (state, samples) in enumerate(zip(states, plan.row_samples, strict=True))
        if samples and state.sampling.logprobs is not None
    ]
    prompts = plan.to_score
    if not drawn and prompts is None:
        return None
    scoring = Scoring([row for row, _ in drawn], [count for _, count in drawn], [], [], [])
    if prompts is not None:
        for row, position, token_ids in zip(prompts.rows, prompts.positions, prompts.token_ids, strict=True):
            first = query_start[row] + position - 1 - plan.row_starts[row]
            scoring.prompt_tokens.extend(range(first, first + len(token_ids)))
            scoring.prompt_target_ids.extend(token_ids)
            scoring.prompt_num_top.extend([states[row].sampling.prompt_logprobs or 0] * len(token_ids))
    return scoring


def _make_processing(plan: StepPlan, states: Sequence[SequenceState], masks: MaskMaker) -> Processing | None:
    """Return the processors and masks that can change what is sampled, or None."""
    grammars = [
        (row, grammar)
        for row, (state, samples) in enumerate(zip(states, plan.row_samples, strict=True))
        if samples and (grammar := state.sequence_grammar()) is not None
    ]
    processors = [
        (row, processor)
        for row, (state, samples) in enumerate(zip(states, plan.row_samples, strict=True))
        if samples and (processor := state.logit_processor()) is not None and not processor.is_idle
    ]
    if not processors and not grammars:
        return None
    return Processing(
        rows=[row for row, _ in processors],
        processors=[processor for _, processor in processors],
        masked_rows=[row for row, _ in grammars],
        masks=masks.begin([grammar for _, grammar in grammars]) if grammars else no_masks,
    )


def scores_of(plan: StepPlan, scoring: Scoring, drawn: Drawn) -> StepScores:
    """Return the backend's scores by sequence. Raises ValueError if the backend returned none."""
    if drawn.scores is None or drawn.prompt_scores is None:
        raise ValueError("the backend does not support logprobs")
    packed = []
    start = 0
    scoring = scoring.without(drawn.broken_rows)
    prompts = plan.to_score
    for token_ids in prompts.token_ids if prompts is not None else ():
        # packed here, in the executor's thread, so that neither process's loop handles each number
        packed.append(pack(drawn.prompt_scores.cut(start, start + len(token_ids))))
        start += len(token_ids)
    return StepScores(
        drawn_ids=[plan.row_ids[row] for row in scoring.drawn_rows],
        drawn=drawn.scores,
        prompt_ids=[plan.row_ids[row] for row in prompts.rows] if prompts is not None else [],
        prompt_positions=prompts.positions if prompts is not None else [],
        prompts=packed,
    )
