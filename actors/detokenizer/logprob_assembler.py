"""Assemble logprobs: the text and bytes of scored tokens, and their offsets in the text of the choice.

Used by the detokenizer: one `PromptAssembler` for each prompt that is echoed or scored, shared by all its choices, and
one `LogprobAssembler` for each sequence whose outputs are scored.

What must always hold: every scored token comes out once, in order; an offset is the number of characters before the
token in the text of its choice, whether or not they have been sent yet.
"""

from __future__ import annotations

from array import array

from ..messages.prompts import PromptText
from ..messages.scores import LikelyToken, ScoredToken, Scores
from ..shared.scored_tokens import ScoredColumns, num_packed
from ..shared.token_decoding import TokenDecoder, TokenTextLookup


class PromptAssembler:
    """One prompt's text, if it is echoed, and its scores, which the engine sends in parts."""

    def __init__(
        self, token_text: TokenTextLookup, echo: PromptText | None, num_scores: int, request_id: str = ""
    ) -> None:
        """`num_scores`: how many tokens the engine will score."""
        self.request_id = request_id
        self.text = "" if echo is None else echo.text
        self.scores = ScoredColumns(token_text)
        self._offsets = array("I") if echo is None else array("I", echo.offsets)
        self._num_missing = num_scores
        self._end = 0
        """Position after the last token whose score was added."""
        if echo is not None:
            self.scores.append_unscored(echo.first_token_id)

    @property
    def is_complete(self) -> bool:
        return self._num_missing <= 0

    def add(self, end: int, payload: bytes) -> None:
        """Add the packed scores of the prompt tokens before position `end`, in order and each once."""
        count = num_packed(payload)
        if end - count < self._end:
            return
        self.scores.extend(payload, self._offsets[end - count : end])
        self._num_missing -= count
        self._end = end


class LogprobAssembler:
    def __init__(self, token_text: TokenTextLookup, decoder: TokenDecoder, num_characters: int = 0) -> None:
        """`decoder` decodes the sequence's outputs once more, for their offsets.

        `num_characters`: the length of the choice's text before the first output.
        """
        self._token_text = token_text
        self._decoder = decoder
        self._num_characters = num_characters

    def next_token(self, scores: Scores, at: int) -> ScoredToken:
        """Return the sequence's next output, whose scores are at index `at`."""
        token_id = scores.token_ids[at]
        decoded = self._token_text(token_id)
        token = ScoredToken(
            token_id=token_id,
            text=decoded.text,
            utf8=decoded.utf8,
            offset=self._num_characters,
            logprob=scores.logprobs[at],
            rank=scores.ranks[at],
            top=tuple(
                self._likely_token(top_id, logprob, rank)
                for rank, (top_id, logprob) in enumerate(
                    zip(scores.top_ids[at], scores.top_logprobs[at], strict=True), start=1
                )
            ),
        )
        self.skip(token_id)
        return token

    def skip(self, token_id: int) -> None:
        """Take an output whose score was sent before."""
        self._num_characters += len(self._decoder.push(token_id))

    def _likely_token(self, token_id: int, logprob: float, rank: int) -> LikelyToken:
        decoded = self._token_text(token_id)
        return LikelyToken(token_id, decoded.text, decoded.utf8, logprob, rank)
