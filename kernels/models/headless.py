"""A model without its output head, as embeddings are computed: what backends call its logits are final hidden states.

What must always hold: the head is not loaded; an embedding table that doubles as one is.
"""

from __future__ import annotations

import torch

from ..ops import Ops
from .families import Model


class Headless:
    """Implements `families.Model`."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        return self._model.forward(token_ids_N, ops)

    def states(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        return self._model.states(x_ND, ops)

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm alone."""
        return self._model.states(x_ND, ops)
