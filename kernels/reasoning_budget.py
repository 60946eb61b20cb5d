"""How many tokens of reasoning one sequence has drawn, and which token it must draw to end it.

What must always hold: the state depends on the sequence's outputs alone, not on when they were added, so that it can be
rebuilt after a preemption. Adding an output takes constant time (amortized), however long the delimiters are.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy


class ReasoningBudget:
    """Reasoning begins in the prompt or with the opening delimiter, and ends with the closing one, once and for all."""

    def __init__(self, num_tokens: int, opening: Sequence[int], closing: Sequence[int], *, prompt_opens: bool) -> None:
        """Begin before the first output. The delimiters, as token ids, are not empty."""
        self._num_tokens = num_tokens
        self._opening = Finder(opening)
        self._closing = Finder(closing)
        self._num_drawn = 0  # outputs after the opening delimiter, wherever that is
        self._is_open = prompt_opens
        self._has_ended = False

    def add_output(self, token_id: int) -> None:
        """Record a token that the sequence has drawn."""
        if self._is_open:
            self._num_drawn += 1
            if self._closing.add(token_id):
                self._is_open, self._has_ended = False, True
        elif not self._has_ended and self._opening.add(token_id):
            self._is_open = True

    def __copy__(self) -> ReasoningBudget:
        """Return one to which outputs can be added apart from this one."""
        other = object.__new__(ReasoningBudget)
        vars(other).update(vars(self), _opening=copy(self._opening), _closing=copy(self._closing))
        return other

    @property
    def forced_token_id(self) -> int | None:
        """The only token that may be drawn next: the closing delimiter's next one. None: the budget forces nothing."""
        if not self._is_open or self._num_drawn < self._num_tokens:
            return None
        return self._closing.ids[self._closing.num_matched]


class Finder:
    """Finds the first occurrence of some ids in a stream (Knuth, Morris and Pratt 1977)."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.num_matched = 0
        """The length of the longest end of the stream that `ids` begin with."""
        self._shorter = [0] * len(ids)  # by the last matched index: the next shorter match
        for index in range(1, len(ids)):
            self._shorter[index] = self._extended(self._shorter[index - 1], ids[index])

    def add(self, token_id: int) -> bool:
        """Add a token to the stream. Return whether the ids are complete; no token may follow then."""
        self.num_matched = self._extended(self.num_matched, token_id)
        return self.num_matched == len(self.ids)

    def _extended(self, num_matched: int, token_id: int) -> int:
        while num_matched and self.ids[num_matched] != token_id:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + (self.ids[num_matched] == token_id)
