"""The logprobs of an answer's text, for an API whose answers consist of blocks.

Tokens come with offsets in the output, events with the characters of the output that they are made of, so both can be
laid side by side, although events may be held back for many tokens.

What must always hold: the bytes of a block's tokens, joined, are its text, except at its ends, if a token there has a
part that belongs to a delimiter or was cut; tokens of reasoning, calls and delimiters are in none, and no token is in
two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from quipu.actors.messages.handler import Delta, ScoredDelta
from quipu.actors.messages.output import Markup, OutputEvent, ReasoningDelta, TextDelta
from quipu.actors.messages.scores import LikelyToken, ScoredToken
from quipu.actors.shared.scored_tokens import ScoredColumns
from quipu.actors.shared.token_decoding import TokenText

REPLACEMENT = "\ufffd"


class KeptScores(ScoredColumns):
    """Scored tokens that have come as objects, in columns."""

    def __init__(self, texts: dict[int, TokenText] | None = None) -> None:
        """`texts` of tokens by id, which may be shared with others."""
        self._texts = {} if texts is None else texts
        super().__init__(self._texts.__getitem__)

    def append(self, token: ScoredToken) -> None:
        super().append(token)
        texts = self._texts
        told: tuple[ScoredToken | LikelyToken, ...] = (token, *token.top)
        for one in told:
            if one.token_id not in texts:
                texts[one.token_id] = TokenText(one.text, one.utf8)


class TextScores:
    """The scored tokens of the text of one choice, so far."""

    def __init__(self, *, with_reasoning: bool = True, with_stop: bool = False) -> None:
        """`with_reasoning`: reasoning is shown, and separates blocks.

        `with_stop`: the token that ends the output is shown.
        """
        self.columns = KeptScores()
        self._with_reasoning = with_reasoning
        self._with_stop = with_stop
        self._starts: list[int] = []
        """For each block of text, the number of tokens before it."""
        self._is_open = False
        """The next text belongs to the last block."""
        self._num_characters = 0
        """Of the output, in all events so far."""
        self._waiting: deque[ScoredToken] = deque()
        """Tokens that may have characters in later events."""

    def block(self, number: int) -> range:
        """Return which of `columns` are those of a block of text; blocks of text are counted from 0."""
        starts = self._starts
        if number >= len(starts):
            return range(0)
        return range(starts[number], starts[number + 1] if number + 1 < len(starts) else len(self.columns))

    def add(self, delta: Delta) -> None:
        if isinstance(delta, ScoredDelta) and (self._with_stop or delta.stop_token_id is None):
            self._waiting.extend(delta.scores)
        events: Iterable[OutputEvent] = delta.events or (TextDelta(delta.text),)
        for event in events:
            start = self._num_characters
            self._num_characters = end = start + len(event.source)
            is_text = isinstance(event, TextDelta)
            if is_text and end > start and not self._is_open:
                self._is_open = True
                self._starts.append(len(self.columns))
            elif not is_text and self._is_shown(event):
                self._is_open = False
            if end > start:
                self._take(start, end, is_text=is_text)

    def _is_shown(self, event: OutputEvent) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._with_reasoning and bool(event.text)
        return not isinstance(event, Markup)

    def _take(self, start: int, end: int, *, is_text: bool) -> None:
        """Take the tokens with a part of the output from `start` to `end`, and drop those that end there."""
        waiting = self._waiting
        while waiting and waiting[0].offset < end:
            token = waiting[0]
            after = waiting[1].offset if len(waiting) > 1 else None
            """Where the token ends. None: not known, and not before `end`."""
            if after == token.offset:  # without characters of its own: a part of one, or hidden
                is_in_it = token.offset >= start and REPLACEMENT in token.text
            else:
                is_in_it = after is None or after > start
            if is_text and is_in_it:
                self.columns.append(token)
            elif after is None or after > end:
                return
            waiting.popleft()
