"""Tell whether a prompt has opened reasoning, and count the output's tokens of reasoning.

Delimiters may be held back and cut anywhere. The parser says how far from the end of the text so far a delimiter begins
or ends; `ReasoningCount` finds the token there. What must always hold: each token counts at most once.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from .delimiter_programs import Meaning
from .delimiter_scanner import DelimiterScanner, Hold
from .response_template import ResponseTemplate


@attrs.frozen
class PromptEnd:
    is_open: bool
    """The prompt has opened reasoning and not closed it."""
    is_at_delimiter: bool
    """Nothing but white space follows the prompt's last delimiter of reasoning."""


def read_prompt(template: ResponseTemplate, tail: Iterable[tuple[int, str]]) -> PromptEnd:
    """Read a prompt's last tokens and their texts. Special tokens, such as those between turns, end reasoning."""
    if template.reasoning is None:
        return PromptEnd(False, False)
    scanner = DelimiterScanner(template.prompt_programs, Hold.NOTHING)
    last: Meaning | None = None
    is_blank = True
    for token_id, piece in tail:
        stand = template.specials.by_id.get(token_id)
        if stand is not None:
            piece = stand.replace(piece)
        elif token_id in template.special_ids:
            last = None
            scanner.take()
            continue
        while piece:
            scan = scanner.feed(piece)
            is_blank = is_blank and not scan.text.strip()
            if scan.found is not None:
                last, is_blank = scan.found.delimiter.meaning, True
            piece = scan.rest
    is_blank = is_blank and not scanner.held.strip()
    return PromptEnd(last is Meaning.REASONING_OPEN, last is not None and is_blank)


@attrs.define(eq=False)
class ReasoningCount:
    tokens: int = 0
    """All tokens so far."""
    _closed: int = 0
    """Tokens of reasoning that is complete."""
    _closed_at: int = 0
    """The last of these."""
    _first: int | None = None
    """The token with which the current reasoning begins."""
    _end: int = 0
    _marks: list[tuple[int, int]] = attrs.field(factory=list)
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
