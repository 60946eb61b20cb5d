"""Puts words to what the model said of tokens: their text, their bytes, and where they stand in it.

Used by the detokenizer: one `PromptReading` for each prompt that is echoed or scored, which all of its choices share,
and one `Scribe` for each sequence whose outputs are scored. What must always hold: every scored token comes out once,
in order; an offset counts the characters of the choice's text before its token, whether or not they were handed out
yet.
"""

from __future__ import annotations

from array import array

from ..messages.prompts import PromptText
from ..messages.scores import LikelyToken, PackedScores, ScoredToken, Scores
from ..shared.scored_tokens import ScoredColumns, Speller, Spelling, num_packed
from .text_stream import TokenDecoder

__all__ = ["PromptReading", "Scribe", "Speller", "Spelling"]


class PromptReading:
    """What is told of one prompt: its text where that is echoed, and its scores, of which the engine brings parts."""

    def __init__(self, spell: Speller, echo: PromptText | None, num_scores: int) -> None:
        """`num_scores`: tokens that the engine scores."""
        self.text = "" if echo is None else echo.text
        self.scores = ScoredColumns(spell)
        self._offsets = array("I") if echo is None else array("I", echo.offsets)
        self._num_missing = num_scores
        if echo is not None:
            self.scores.append_unscored(echo.first_token_id)

    @property
    def is_complete(self) -> bool:
        """Nothing more will come."""
        return self._num_missing <= 0

    def hear(self, position: int, scores: PackedScores) -> None:
        """Prompt tokens from `position` on have been scored."""
        count = num_packed(scores)
        self.scores.extend(scores, self._offsets[position : position + count])
        self._num_missing -= count


class Scribe:
    def __init__(self, spell: Speller, decoder: TokenDecoder, num_characters: int = 0) -> None:
        """`decoder` decodes the sequence's outputs, as their text does, for the offsets.

        `num_characters` of the choice's text come before them.
        """
        self._spell = spell
        self._decoder = decoder
        self._num_characters = num_characters

    def drawn(self, scores: Scores, at: int) -> ScoredToken:
        """The sequence's next output."""
        token_id = scores.token_ids[at]
        spelling = self._spell(token_id)
        token = ScoredToken(
            token_id=token_id,
            text=spelling.text,
            utf8=spelling.utf8,
            offset=self._num_characters,
            logprob=scores.logprobs[at],
            rank=scores.ranks[at],
            top=tuple(
                self._name(top_id, logprob, rank)
                for rank, (top_id, logprob) in enumerate(
                    zip(scores.top_ids[at], scores.top_logprobs[at], strict=True), start=1
                )
            ),
        )
        self._num_characters += len(self._decoder.push(token_id))
        return token

    def _name(self, token_id: int, logprob: float, rank: int) -> LikelyToken:
        spelling = self._spell(token_id)
        return LikelyToken(token_id, spelling.text, spelling.utf8, logprob, rank)
