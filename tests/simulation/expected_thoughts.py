"""How a right output goes on, token by token: reasoning, how a budget ends it, and what a grammar makes of the rest.

    opening, if its grammar has it reason    `<think>`, as the only tokens that are allowed
    reasoning                                whatever the model draws, until it or the budget has written `</think>`
    answer                                   what the grammar allows

A prompt may end with `<think>`: then its outputs begin amid reasoning.
"""

from __future__ import annotations

import attrs

from tests.simulation.arrival import Arrival
from tests.simulation.fake_grammars import in_reasoning, next_token

THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
"""Around reasoning."""
Ids = tuple[int, ...]


@attrs.define
class Course:
    """Where an output is. `opening` and `closing` are the tokens around reasoning."""

    arrival: Arrival
    opening: Ids
    closing: Ids
    eos_token_ids: Ids
    answer: Ids = ()
    num_thoughts: int = 0
    """Tokens of its reasoning so far, those around it included."""
    _thoughts: Ids = ()
    _is_thinking: bool = False
    _may_think: bool = False

    def __attrs_post_init__(self) -> None:
        self._is_thinking, self._may_think = self.arrival.is_amid_reasoning, self.arrival.reasons

    def next_token(self, drawn: int) -> int:
        """Return what comes next where `drawn` would without grammar and budget."""
        arrival = self.arrival
        if self._may_think:
            return self.opening[len(self.answer)]
        if not self._is_thinking:
            return next_token(arrival.grammar, arrival.script, self.answer, drawn) if arrival.grammar else drawn
        if arrival.thinking_budget is not None and len(self._thoughts) >= arrival.thinking_budget:
            return self.closing[self._num_closed]
        if not arrival.grammar:
            return drawn
        ids = in_reasoning(self.closing, self.eos_token_ids)
        return drawn if drawn in ids else ids[drawn % len(ids)]

    def add(self, token_id: int) -> None:
        if self._is_thinking:
            self._thoughts += (token_id,)
            self.num_thoughts += 1
            self._is_thinking = self._thoughts[-len(self.closing) :] != self.closing
            return
        self.answer += (token_id,)
        if self._may_think and self.answer == self.opening:
            self._is_thinking, self._may_think, self.answer = True, False, ()
            self.num_thoughts = len(self.opening)

    @property
    def _num_closed(self) -> int:
        """How many tokens of the closing delimiter are there."""
        most = range(len(self.closing) - 1, 0, -1)
        return next((num for num in most if self._thoughts[-num:] == self.closing[:num]), 0)
