"""Puts words to what the model said of tokens: their text, their bytes, and where they stand in it.

Used by the detokenizer, one `Scribe` for each sequence whose client asked for logprobs or for its prompt back. What
must always hold: every scored token comes out once, in order; an offset counts the characters of the choice's text
before its token, whether or not they were handed out yet.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from quipu.actors.core.text import TokenDecoder
from quipu.actors.messages import LikelyToken, PromptText, ScoredToken, Scores


@attrs.frozen
class Spelling:
    """One token by itself."""

    text: str
    utf8: bytes


class Scribe:
    def __init__(self, spell: Callable[[int], Spelling], decoder: TokenDecoder, echo: PromptText | None) -> None:
        """`decoder` decodes the sequence's outputs, as their text does, for the offsets."""
        self._spell = spell
        self._decoder = decoder
        self._echo = echo
        self._num_characters = len(echo.text) if echo is not None else 0
        self._prompt: list[ScoredToken] = []

    @property
    def echoed_text(self) -> str:
        """What the choice's text begins with."""
        return self._echo.text if self._echo is not None else ""

    def hear_prompt(self, position: int, scores: Scores) -> None:
        """Prompt tokens from `position` on have been scored."""
        offsets = self._echo.offsets if self._echo is not None else None
        for at in range(len(scores.token_ids)):
            self._prompt.append(self._put(scores, at, 0 if offsets is None else offsets[position + at]))

    def take_prompt(self) -> tuple[ScoredToken, ...]:
        """All that was said of the prompt; its first token, of which nothing can be, only where it is echoed."""
        prompt, self._prompt = self._prompt, []
        if self._echo is None:
            return tuple(prompt)
        token_id = self._echo.first_token_id
        spelling = self._spell(token_id)
        return (ScoredToken(token_id, spelling.text, spelling.utf8, 0, None, None, ()), *prompt)

    def drawn(self, scores: Scores, at: int) -> ScoredToken:
        """The sequence's next output."""
        token = self._put(scores, at, self._num_characters)
        self._num_characters += len(self._decoder.push(token.token_id))
        return token

    def _put(self, scores: Scores, at: int, offset: int) -> ScoredToken:
        token_id = scores.token_ids[at]
        spelling = self._spell(token_id)
        return ScoredToken(
            token_id=token_id,
            text=spelling.text,
            utf8=spelling.utf8,
            offset=offset,
            logprob=scores.logprobs[at],
            rank=scores.ranks[at],
            top=tuple(
                self._name(top_id, logprob, rank)
                for rank, (top_id, logprob) in enumerate(
                    zip(scores.top_ids[at], scores.top_logprobs[at], strict=True), start=1
                )
            ),
        )

    def _name(self, token_id: int, logprob: float, rank: int) -> LikelyToken:
        spelling = self._spell(token_id)
        return LikelyToken(token_id, spelling.text, spelling.utf8, logprob, rank)
