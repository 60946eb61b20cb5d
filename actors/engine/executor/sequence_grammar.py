"""Finds the outputs of a sequence that belong to the answer that has to match its grammar.

The executor keeps a `SequenceGrammar` for each such sequence and adds every sampled token to it; `grammars.py` has a
process follow the answer.

    prompt opened reasoning:          reasoning ... closing ids, white space?, answer
        prompt opened and closed it:      answer
    otherwise:                        opening ids, then as in the first line; or the answer at once

What must always hold: the state depends on the grammar and on the outputs alone, so that it is the same after a
preemption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quipu.kernels.reasoning_budget import Finder

from ...messages.sampling import OutputGrammar

MAX_GAP = 2
"""Maximum number of whitespace tokens between reasoning and answer, each of up to eight characters."""


class ForcedTokens:
    """What the process that follows a grammar has told last: how the answer has to go on.

    Told in one thread, and read in another once the masks of that step are there.
    """

    def __init__(self) -> None:
        self._told: tuple[int, int, Mapping[int, list[int]]] = (-1, 0, {})

    def tell(self, num_answers: int, num_tokens: int, runs: Mapping[int, list[int]]) -> None:
        """Note how an answer goes on after so many tokens. `runs`: by a number of tokens that may come next, these and
        the ones that they force."""
        self._told = num_answers, num_tokens, runs

    def after(self, num_answers: int, answer: Sequence[int]) -> list[int]:
        """Return the tokens that have to follow, as far as they are known."""
        told_answers, num_tokens, runs = self._told
        if told_answers != num_answers:
            return []
        since = list(answer[num_tokens:])
        num = len(since)
        return max(
            (run[num:] for first, run in runs.items() if first <= num and run[:num] == since), key=len, default=[]
        )


class SequenceGrammar:
    """The grammar of one sequence, and the outputs that belong to its answer."""

    def __init__(self, grammar: OutputGrammar, output_token_ids: Sequence[int], *, ends_early: bool) -> None:
        """`output_token_ids`: those sampled so far. `ends_early`: whether it may end where it could also continue."""
        self.tenant, self.owner = grammar.tenant, grammar.owner
        self.text = grammar.text
        self.ends_early = ends_early
        self.answer: list[int] = []
        """Outputs from where the answer may begin."""
        self.num_answers = 0
        """How often `answer` was restarted because an apparent answer turned out to open reasoning."""
        self.gap = 0
        """Number of whitespace tokens that may precede the answer."""
        self.forced = ForcedTokens()
        self._opening = grammar.reasoning_opening_ids
        self._closing = Finder(grammar.reasoning_closing_ids) if grammar.prompt_opens_reasoning else None
        self._may_open = bool(self._opening) and self._closing is None
        self._closing_ids = grammar.reasoning_closing_ids
        for token_id in output_token_ids:
            self.add_output(token_id)

    def add_output(self, token_id: int) -> None:
        """Record a sampled token."""
        if self._closing is not None:
            if self._closing.add(token_id):
                self._closing, self.gap = None, MAX_GAP
            return
        self.answer.append(token_id)
        if self._may_open and tuple(self.answer) == self._opening:
            self._closing, self._may_open = Finder(self._closing_ids), False
            self.answer, self.num_answers = [], self.num_answers + 1
        elif self._may_open and tuple(self.answer) != self._opening[: len(self.answer)]:
            self._may_open = False

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning is open: then any token is allowed that does not end the output before its answer."""
        return self._closing is not None

    def forced_next(self) -> list[int]:
        """Return the tokens that have to come next, each the only one that may, as far as they are known."""
        return [] if self.is_reasoning or self._may_open else self.forced.after(self.num_answers, self.answer)

    def num_to_follow(self, draft: Sequence[int]) -> int:
        """Return how many of these tokens may come next without any but the answer's own grammar deciding about them.

        None while reasoning may be opened; of reasoning, those before it could close.
        """
        if self._may_open:
            return 0
        if self._closing is None:
            return len(draft)
        last = self._closing_ids[-1]
        return next((at for at, token_id in enumerate(draft) if token_id == last), len(draft))

    @property
    def next_opening_id(self) -> int | None:
        """The token with which the model may begin or continue to open reasoning."""
        return self._opening[len(self.answer)] if self._may_open else None
