"""Count the tokens of reasoning, whose delimiters may be held back and cut anywhere.

The parser says how far from the end of the text so far a delimiter begins or ends; this knows which token that was.
What must always hold: a token counts once, and at most all tokens count.
"""

from __future__ import annotations


class ReasoningCount:
    __slots__ = ("_closed", "_closed_at", "_end", "_first", "_marks", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        """All tokens so far."""
        self._closed = 0
        """Tokens of reasoning that is complete."""
        self._closed_at = 0
        """The last of these."""
        self._first: int | None = None
        """The token with which the current reasoning begins."""
        self._end = 0
        self._marks: list[tuple[int, int]] = []
        """Where the text of each token begins that has text held back, and the token."""

    @property
    def num_tokens(self) -> int:
        return self._closed + (0 if self._first is None else self.tokens - self._first + 1)

    def extend(self, length: int) -> None:
        """Note how many characters the current token has released."""
        self._marks.append((self._end, self.tokens))
        self._end += length

    def forget(self) -> None:
        """Forget where the tokens began: nothing is held back."""
        self._marks.clear()

    def open_before(self) -> None:
        """Note that the prompt has opened reasoning."""
        self._first = 1

    def open(self, num_from_end: int) -> None:
        self._first = max(self._token_at(num_from_end), self._closed_at + 1)

    def close(self, num_from_end: int) -> None:
        if self._first is not None:
            self._closed_at = max(self._token_at(num_from_end), self._first - 1)
            self._closed += self._closed_at - self._first + 1
            self._first = None

    def _token_at(self, num_from_end: int) -> int:
        position = self._end - num_from_end
        for begin, token in reversed(self._marks):
            if begin <= position:
                return token
        return self.tokens
