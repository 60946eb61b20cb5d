"""Drafts for the fake backend: as many right tokens as a hash says, and nonsense after them.

Used by tests and by `--fake-most-tokens`, so that what rows of several tokens do to everything else can be tried
without a model. What must always hold: a draft depends on its sequence alone.
"""

from __future__ import annotations

from quipu.kernels.fake import NONSENSE, FakeBackend, draw
from quipu.kernels.fake_rules import draw_by_rules
from quipu.kernels.fake_scores import slot_value

from .draft_search import Draft
from .sequence_state import SequenceState
from .step_rows import StepRows


class FakeDrafter:
    """Knows what the fake backend will draw, apart from grammars. Depths follow the backend's dials."""

    max_tokens: int | None = None
    expects_drafts = True

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    @property
    def max_depth(self) -> int:
        return self._backend.dials.most_tokens - 1

    def propose(self, rows: StepRows) -> dict[int, Draft]:
        drafts = {
            row: self._draft(rows.states[row], rows.ends[row] - rows.starts[row] - 1)
            for row in range(rows.num_going_on)
        }
        return {row: Draft(tokens, []) for row, tokens in drafts.items() if tokens}

    def note_accepted(self, sequence_id: int, num_accepted: int) -> None:
        pass

    def release(self, sequence_id: int, state: SequenceState) -> None:
        pass

    def forget_outputs(self) -> None:
        pass

    def _draft(self, state: SequenceState, most: int) -> list[int]:
        if most <= 0 or state.sampling.grammar is not None:
            return []
        dials, sampling = self._backend.dials, state.sampling
        seed = sampling.seed if sampling.temperature > 0 else 0
        values = [slot_value(token_id, position, state.adapter) for position, token_id in enumerate(state.tokens)]
        tokens: list[int] = []
        num_right = most
        while len(tokens) < num_right:
            if dials.only_token_id is None:
                token_id = draw(values, seed, state.num_outputs + len(tokens), dials)
            else:
                token_id = dials.only_token_id
            if dials.applies_rules and (processor := state.logit_processor()) is not None:
                token_id = draw_by_rules(processor.after(tokens), token_id)
            if not tokens:
                num_right = slot_value(token_id, len(values)) % (most + 1)
            if num_right:
                tokens.append(token_id)
                values.append(slot_value(token_id, len(values), state.adapter))
        return tokens + [NONSENSE] * (most - len(tokens))
