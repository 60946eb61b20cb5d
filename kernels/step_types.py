"""How a sequence's tokens are drawn, and how they score: types that messages carry from the request to the backends.

Neither torch nor numpy is imported here, so that the web process may import this.

What must always hold: values are never changed once they are handed out, except while `Scores` are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import attrs
import msgspec
from msgspec.structs import astuple


class SequenceKind(StrEnum):
    """What a sequence is computed for."""

    GENERATE = "generate"
    """Tokens."""
    EMBED = "embed"
    """A vector of its prompt; nothing is drawn."""
    SCORE = "score"
    """How well a document answers a query, which are its prompt; or a vector for that. Nothing is drawn."""


@attrs.frozen(eq=False)
class PromptImage:
    """An image in a prompt, as the model wants it."""

    digest: bytes
    """Of its pixels and their arrangement: what equal images share."""
    pixels: bytes
    """Red, green and blue of each pixel, row by row from the top."""
    height: int
    width: int
    num_tokens: int
    """Placeholders that stand for it in the prompt, one after the other."""
    start: int = 0
    """Position of the first of them."""

    @property
    def end(self) -> int:
        """Return the position after the last of them."""
        return self.start + self.num_tokens


@attrs.frozen
class RowSampling:
    """How one sequence's tokens are drawn; a request's sampling parameters are one. The rows of a sequence share it.

    Defaults are greedy, every filter off. A sampler that does not apply a field leaves rows that set it to
    `sampling/oracle.py`.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """In [0, 1]; 0 is off."""
    seed: int = 0
    """64 bits, unsigned: Philox's key."""


@attrs.frozen
class LogitRules:
    """How one sequence's logits are changed before a token is drawn. Names and semantics are vLLM's.

    `logit_processors.py` defines the arithmetic.
    """

    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was drawn before."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the token was drawn."""
    repetition_penalty: float = 1.0
    """Above 0. Divides positive and multiplies negative logits of tokens that are in the prompt or were drawn."""
    bias: Mapping[int, float] = attrs.field(factory=dict)
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be drawn. Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output must not contain, filled in by the tokenizer: the last one is not drawn
    after the others."""
    min_tokens: int = 0
    held_back_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, filled in by the tokenizer: not drawn before there are `min_tokens` outputs."""
    thinking_budget: int | None = None
    """After this many tokens of reasoning, `reasoning_closing_ids` are drawn, whatever the other rules say. This and
    the following are filled in by the tokenizer."""
    reasoning_opening_ids: tuple[int, ...] = ()
    reasoning_closing_ids: tuple[int, ...] = ()
    """Not empty if there is a budget, nor are `reasoning_opening_ids`."""
    prompt_opens_reasoning: bool = False
    """The first output is reasoning already."""

    def without_budget(self) -> LogitRules:
        """Return the rules that remain once reasoning has ended."""
        return attrs.evolve(
            self,
            thinking_budget=None,
            reasoning_opening_ids=(),
            reasoning_closing_ids=(),
            prompt_opens_reasoning=False,
        )


class Scores(msgspec.Struct, array_like=True, frozen=True):
    """Logprobs and ranks of some tokens, as parallel columns.

    A logprob is the log-softmax of the raw logits in float32, before temperature and filters. Tokens are ordered by
    descending logit, ties by ascending id.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """1 is the most likely token."""
    top_ids: list[list[int]]
    """The most likely tokens, best first, as many as requested; the scored one may or may not be among them."""
    top_logprobs: list[list[float]]

    @classmethod
    def empty(cls) -> Scores:
        return cls([], [], [], [], [])

    def extend(self, others: Scores) -> None:
        """Append `others`."""
        for column, more in zip(astuple(self), astuple(others), strict=True):
            column.extend(more)

    def cut(self, start: int, end: int) -> Scores:
        """Return those from `start` to `end`, exclusive."""
        return Scores(*(column[start:end] for column in astuple(self)))

    def pick(self, indexes: list[int]) -> Scores:
        """Return those at `indexes`."""
        return Scores(*([column[at] for at in indexes] for column in astuple(self)))
