"""A causal language model of transformers in two steps: hidden states of all tokens, then logits of some.

Between its decoder and its logits a model may do more than multiply with a matrix: it may scale or cap them. So for
logits the model itself is run, with a decoder that returns hidden states that are there already.

What must always hold: only one thread runs the model. `start_checks.py` has compared its logits with the model's own.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch


class SplitModel:
    """A model and its decoder."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._decoder = model.get_decoder()

    def hidden_states(
        self, token_ids_1N: torch.Tensor, positions_1N: torch.Tensor, x_1ND: torch.Tensor | None = None
    ) -> HiddenStates:
        """Run the decoder. `x_1ND`: what it reads in the place of its own embeddings of the tokens."""
        read = {"input_ids": token_ids_1N} if x_1ND is None else {"inputs_embeds": x_1ND}
        return HiddenStates(self, self._decoder(**read, position_ids=positions_1N, use_cache=False))

    def embeddings(self, token_ids_1N: torch.Tensor) -> torch.Tensor:
        """Return `[1, N, D]`."""
        x_1ND: torch.Tensor = self.model.get_input_embeddings()(token_ids_1N)
        return x_1ND

    def logits(self, output: Any, x_MD: torch.Tensor) -> torch.Tensor:
        """Return logits `[M, V]` of hidden states, as the model makes them of what its decoder returns."""
        given = type(output)(**{**output, "last_hidden_state": x_MD.unsqueeze(0)})
        tokens_1M = torch.zeros(1, len(x_MD), dtype=torch.int64, device=x_MD.device)
        self._decoder.forward = lambda *_, **__: given
        try:
            logits_MV: torch.Tensor = self.model(input_ids=tokens_1M, use_cache=False).logits[0]
        finally:
            del self._decoder.forward
        return logits_MV


@attrs.frozen(eq=False)
class HiddenStates:
    """What the decoder has returned for a pass."""

    _model: SplitModel
    _output: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return float32 logits `[len(tokens), V]` of these flat token indexes, on the host."""
        x_ND = self._output.last_hidden_state[0]
        if not tokens:
            return torch.empty(0, int(self._model.model.config.get_text_config().vocab_size))
        return self._model.logits(self._output, x_ND[tokens]).to("cpu", torch.float32).contiguous()

    def rows(self, tokens: list[int]) -> tuple[torch.Tensor, range]:
        return self.logits(tokens), range(len(tokens))
