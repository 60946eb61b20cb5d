"""Changes to one row of logits that can be undone: bans, masks, a forced token, new values.

`logit_processors.py` makes an `Edit` for each row that is changed before a token is drawn.

What must always hold: after `undo` a row has its raw values again; no change hides that the model computed NaN or +inf.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .seen_tokens import Ids

Row = npt.NDArray[np.float32]

_NEVER = np.float32(-np.inf)
_NEVER_BITS = _NEVER.view(np.int32)
_LOOKED_AT_FIRST = 64
"""Tokens of a row."""


class Edit:
    """Changes to one row that can be undone."""

    def __init__(self, logits_V: Row) -> None:
        self.logits_V = logits_V
        self.is_masked = False
        self.is_contradictory = False
        """A mask, alone or with the bans, allows no token."""
        self.is_broken = False
        """A ban would have hidden NaN or +inf, from which no token may be drawn."""
        self._replaced: list[tuple[Ids | slice, Row]] = []

    def put(self, ids: Ids, values: Row | np.float32) -> None:
        self._replaced.append((ids, self.logits_V[ids]))
        self.logits_V[ids] = values

    def ban(self, ids: Ids) -> None:
        """Ban these tokens, unless none would be left."""
        self.is_broken |= not (self.logits_V[ids] < np.inf).all()
        self.put(ids, _NEVER)
        self._undo_if_none_left()

    def hold_back(self, ids: Ids) -> None:
        """Ban the tokens that end a sequence, unless none would be left: a grammar may want one."""
        was_contradictory = self.is_contradictory
        self.ban(ids)
        self.is_contradictory = was_contradictory

    def ban_all_but(self, ids: Ids) -> None:
        """Ban all other tokens, unless none would be left."""
        kept = self.logits_V[ids]
        self.is_broken |= not self.logits_V.max() < np.inf
        self._replaced.append((slice(None), self.logits_V.copy()))
        self.logits_V.fill(_NEVER)
        self.logits_V[ids] = kept
        self._undo_if_none_left()

    def force(self, token_id: int) -> None:
        """Ban all other tokens, and undo what was done to this one. A row that no token can be drawn from stays so."""
        self.undo()
        self.is_contradictory = False
        if np.isfinite(self.logits_V.max()):
            self._replaced.append((slice(None), self.logits_V.copy()))
            self.logits_V.fill(_NEVER)
            self.logits_V[token_id] = 0

    def mask(self, words: bytes, *, keeps_raw: bool = True) -> None:
        """Ban the tokens whose bit is 0, and those that have none. A mask without any bit may be left out."""
        # a count beyond the bits pads with zeros
        bits = np.unpackbits(np.frombuffer(words, dtype=np.uint8), count=len(self.logits_V), bitorder="little")
        self.is_masked, self.is_contradictory = True, not bits.any()
        if keeps_raw:
            self._replaced.append((slice(None), self.logits_V.copy()))
        elif self.is_contradictory:
            return  # nothing could restore it
        # 0 where a bit is 1, else minus infinity: from -1, all of whose bits are 1. Five times as fast as a table.
        added = (bits.view(np.int8) - np.int8(1)).astype(np.int32)
        added &= _NEVER_BITS  # in place: for 150,000 tokens, another array costs as much as the operation
        with np.errstate(invalid="ignore"):  # +inf becomes NaN, from which nothing is drawn either
            self.logits_V += added.view(np.float32)

    def undo(self) -> None:
        while self._replaced:
            self._undo_last()

    def _undo_if_none_left(self) -> None:
        # nearly always one of the first is left, which saves reading all
        if self.logits_V[:_LOOKED_AT_FIRST].max() > _NEVER:
            return
        if self.logits_V.max() == _NEVER:
            self._undo_last()
            self.is_contradictory = self.is_masked

    def _undo_last(self) -> None:
        ids, values = self._replaced.pop()
        self.logits_V[ids] = values
