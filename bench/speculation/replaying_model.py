"""A draft model that is right at a given rate.

Used by `drafted_engine.py`. Its passes are run, over dummy weights, and what they draw is replaced by what the model is
known to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from quipu.actors.engine.executor.draft_model import DraftModel, Wanted

DRAFT_SHAPE: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""A fourteenth of Qwen3-0.6B's weights, about what that has of Qwen3-8B's: overrides of its shape."""


class ReplayingModel(DraftModel):
    """Guesses what a sequence is known to draw, and wrong tokens now and then."""

    def __init__(self, model: DraftModel, rate: float, known: dict[tuple[int, ...], list[int]]) -> None:
        """`known`: prompts, all of the same length, and the same with the outputs that follow them."""
        super().__init__(model.backend, model.costs, max_num_tokens=model.max_num_tokens)
        self._rate = rate
        self._known = known
        self._num_prompt_tokens = len(next(iter(known)))
        self._random = Random(1)

    def guess(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        drawn = super().guess(wanted)
        return [self._replaced(one, len(tokens)) for one, tokens in zip(wanted, drawn, strict=True)]

    def _replaced(self, one: Wanted, num: int) -> list[int]:
        tokens = one.state.tokens
        known = self._known[tuple(tokens[: self._num_prompt_tokens])]
        guesses = [token_id ^ (self._random.random() >= self._rate) for token_id in known[len(tokens) :][:num]]
        # what is right needs no second pass, as if these had been drawn
        self._sequences[one.sequence_id].guessed = guesses[: max(0, num - 1)]
        return guesses
