"""What a sequence's state takes from its request's sampling parameters, and what its rows pass to the backend."""

from __future__ import annotations

import attrs

from quipu.actors.config.declarations import sampling_fields_of
from quipu.actors.engine.executor.batch_builder import make_batch
from quipu.actors.engine.executor.grammars import NoMasks
from quipu.actors.engine.executor.pooler import LAST_TOKEN
from quipu.actors.engine.executor.sequence_state import SequenceState
from quipu.actors.engine.executor.step_rows import StepRows
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.sampling import LogitRules, SamplingParams
from quipu.kernels.logit_processors import Processing
from quipu.kernels.step_types import RowSampling


def test_rows_draw_as_the_request_says() -> None:
    """A row's sampling is the request's own, which declares each field that a backend reads."""
    params = SamplingParams(max_tokens=1, temperature=0.3, top_p=0.4, top_k=5, min_p=0.6, seed=7)
    state = SequenceState(slot=0, sampling=params, num_outputs=0, keys=[b""], tokens=[1])
    assert state.row_sampling is params
    declared = {field.attribute for field in sampling_fields_of(SamplingParams)}
    assert attrs.fields_dict(RowSampling).keys() <= declared, "declare the new field in SamplingParams"


def test_top_p_of_zero_is_greedy() -> None:
    """The row is that of a greedy sequence, so that no backend needs to handle `top_p=0`."""
    params = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.0)
    state = SequenceState(slot=0, sampling=params, num_outputs=0, keys=[b""], tokens=[1])
    row = {name: getattr(state.row_sampling, name) for name in attrs.fields_dict(RowSampling)}
    assert RowSampling(**row) == RowSampling(temperature=0.0)


def test_budget_is_processed_only_where_it_forces_a_token() -> None:
    """Rows of a sequence with only a thinking budget have no processor until it is used up, also after a preemption."""
    rules = LogitRules(
        thinking_budget=2, reasoning_opening_ids=(6,), reasoning_closing_ids=(7, 8), prompt_opens_reasoning=True
    )
    sampling, prompt, outputs = SamplingParams(max_tokens=9, rules=rules), [1, 2, 3], [4, 5, 7, 8, 4]
    state = SequenceState(slot=0, sampling=sampling, num_outputs=0, keys=[b""], tokens=list(prompt))
    processed = []
    for num_outputs, token_id in enumerate(outputs):
        tokens = [*prompt, *outputs[:num_outputs]]
        resumed = SequenceState(slot=0, sampling=sampling, num_outputs=num_outputs, keys=[b""], tokens=tokens)
        processed.append([processing_of(kept) is not None for kept in (state, resumed)])
        state.append_output(token_id)
    assert processed == [[False] * 2, [False] * 2, [True] * 2, [True] * 2, [False] * 2]


def processing_of(state: SequenceState) -> Processing | None:
    """Return the logit processing in the batch of a step that samples for this sequence alone."""
    end = len(state.tokens)
    plan = StepPlan(
        step=1,
        generation=0,
        released_ids=[],
        admitted=[],
        row_ids=[1],
        num_going_on=0,
        most_positions=1,
        chunk_starts=[end - 1],
        chunk_counts=[1],
        new_blocks={},
    )
    rows = StepRows.of(plan, [state], set())
    return make_batch(rows, some_are_scored=False, some_have_rules=True, masks=NoMasks(), pooler=LAST_TOKEN).processing
