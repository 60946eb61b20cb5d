"""Follows the answers of sequences with the same grammar, and computes which tokens may come next in each.

Runs in a separate process for each grammar (`mask_program.py`), which is killed when the library takes too long.

What must always hold: a mask depends on the grammar and on the answer alone; a sequence that fails reports the reason,
and no other fails with it; masks that take too long end their own sequence: a single mask by the limits of the library
and of the process, many by `MAX_DEBT_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import msgspec
import numpy as np

from ...grammars.grammar_library import (
    MAX_MASK_S,
    GrammarError,
    GrammarLibrary,
    GrammarTooComplex,
    Matcher,
    Words,
    regex_grammar,
)

MAX_DEBT_S = 0.1
"""Total CPU time by which the masks of a sequence may exceed `MAX_MASK_S` per token before it fails."""
MAX_COUNTED_S = 0.040
"""Maximum CPU time that is counted for one mask, for each of its tokens.

The library's limits keep nearly every grammar below it. Longer times may not be the grammar's fault: the host may have
paused this virtual machine. A grammar that does take longer fails after four masks, unless the process is killed first.
"""
SLICE_TOKENS = 64
"""Tokens that are followed in one slice, under one limit on CPU time: they take some milliseconds."""
MAX_FORCED = 32
"""Tokens that are told ahead: as many as a step may verify of one sequence."""
_WHITE_SPACE = regex_grammar(r"[ \n\r\t]{1,8}")


class RowAsk(msgspec.Struct, array_like=True):
    """A request for the mask of one sequence."""

    row: int
    """Number of the sequence."""
    is_new: bool
    """Whether to follow the answer from its beginning."""
    token_ids: list[int]
    """Tokens sampled since the last request for it, or since the answer began."""
    gap: int
    """Number of whitespace tokens that may precede the answer."""
    next_opening_id: int | None
    """The token with which the model may begin or continue to open reasoning."""
    ends_early: bool
    """Whether the answer may end where it could also continue."""
    drafts: list[int] = []
    """Tokens that may come next: the masks after each of them are wanted, too."""


@attrs.frozen
class FoundMasks:
    """What may come next in one sequence, and after each of its drafts."""

    words: list[Words]
    forced: dict[int, list[int]]
    """Tokens that have to come next, by the number of drafts before them; none where there is a choice."""


@attrs.define(eq=False)
class _Row:
    gap: int
    matcher: Matcher
    pending: list[int] = attrs.field(factory=list)
    """Tokens of the answer that neither the matcher nor the gap has consumed."""
    has_begun: bool = False
    debt_s: float = 0.0
    """CPU time of its masks beyond `MAX_MASK_S` per token; unused time is not carried over to later masks."""


class RowMasks:
    """Follows the sequences of one grammar."""

    def __init__(
        self,
        library: GrammarLibrary,
        text: str,
        *,
        can_end: bool,
        arm: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Compile a grammar, and compute its first mask. Raises GrammarError.

        `can_end`: whether the model has tokens that end an output. `arm` is called before each piece of work that has
        its own limit on CPU time. `clock`: CPU time in seconds.
        """
        self._library = library
        self._can_end = can_end
        self._arm = arm
        self._clock = clock
        self._rows: dict[int, _Row] = {}
        self._white_space: Words | None = None
        self._compiled = library.compile(text)
        # the first mask may take as long as a step; copies share the state that it was computed from
        self._compiled.fill(np.zeros(library.num_words, np.uint32))

    def forget(self, row: int) -> None:
        """Stop following a sequence."""
        self._rows.pop(row, None)

    def masks(self, ask: RowAsk) -> FoundMasks:
        """Return the tokens that may come next, and those after each draft token. Raises GrammarError.

        Where the grammar does not allow a draft token, the masks after it allow nothing.
        """
        masks = [self.mask(ask)]
        masks += [np.zeros_like(masks[0]) for _ in ask.drafts]
        row = self._rows[ask.row]
        forced: dict[int, list[int]] = {}
        if not row.pending and ask.next_opening_id is None and (row.has_begun or not row.gap):
            forced[0] = row.matcher.forced()
        if ask.drafts and not row.pending:
            ahead = row.matcher.copy()
            run = forced.get(0, [])
            for num, (token_id, words_W) in enumerate(zip(ask.drafts, masks[1:], strict=True), 1):
                self._arm()  # for each mask: one call of the library for all could only be limited as a whole
                try:
                    ahead.consume([token_id])
                    ahead.fill(words_W)
                except GrammarError:
                    words_W.fill(0)
                    break
                self._limit_ends(words_W, ask)
                if len(run) <= num or run[num - 1] != token_id:  # else it is part of what was forced before
                    forced[num] = ahead.forced()
                    run = [*ask.drafts[:num], *forced[num]]
        return FoundMasks(masks, {num: token_ids[:MAX_FORCED] for num, token_ids in forced.items() if token_ids})

    def mask(self, ask: RowAsk) -> Words:
        """Return the tokens that may come next. Raises GrammarError."""
        row = self._rows.get(ask.row)
        if ask.is_new or row is None:
            row = self._rows[ask.row] = _Row(ask.gap, self._compiled.copy())
        row.pending += ask.token_ids
        words_W = np.zeros(self._library.num_words, np.uint32)
        num_tokens, began = max(1, len(row.pending)), self._clock()
        if (matcher := self._follow(row, is_opening=ask.next_opening_id is not None)) is not None:
            self._arm()
            matcher.fill(words_W)
        took_s = min(self._clock() - began, num_tokens * MAX_COUNTED_S)
        row.debt_s = max(0.0, row.debt_s + took_s - num_tokens * MAX_MASK_S)
        if row.debt_s > MAX_DEBT_S:
            raise GrammarTooComplex(f"its tokens take more than {MAX_MASK_S * 1e3:.0f} ms each to find")
        self._limit_ends(words_W, ask)
        if row.gap and not row.has_begun:
            words_W |= self._spaces()
        if (token_id := ask.next_opening_id) is not None and token_id // 32 < len(words_W):
            words_W[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words_W

    def _limit_ends(self, words_W: Words, ask: RowAsk) -> None:
        """Remove the tokens that end an output where it may not end."""
        end_mask = self._library.end_mask
        if not self._can_end or (not ask.ends_early and (words_W & ~end_mask).any()):
            words_W &= ~end_mask

    def _follow(self, row: _Row, *, is_opening: bool) -> Matcher | None:
        """Return a matcher that has consumed all tokens of the answer; None if they open reasoning instead."""
        self._arm()
        if row.pending and is_opening:  # it is not known yet whether reasoning opens
            if not row.matcher.accepts(row.pending):
                return None
            matcher = row.matcher.copy()
            matcher.consume(row.pending)
            return matcher
        while row.pending and row.gap and not row.has_begun and not row.matcher.accepts(row.pending[:1]):
            row.gap -= 1
            del row.pending[0]
        while row.pending:
            self._arm()
            row.matcher.consume(row.pending[:SLICE_TOKENS])
            row.has_begun = True
            del row.pending[:SLICE_TOKENS]
        return row.matcher

    def _spaces(self) -> Words:
        if self._white_space is None:
            self._white_space = np.zeros(self._library.num_words, np.uint32)
            self._library.compile(_WHITE_SPACE).fill(self._white_space)
            self._white_space &= ~self._library.end_mask
        return self._white_space
