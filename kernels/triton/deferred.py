"""Results whose memory is there and whose numbers are not yet: put off by `ops.py`, to be joined with what follows."""

from __future__ import annotations

import attrs
import torch

from ..ops import RopeTable


@attrs.frozen
class Turned:
    """Heads that are to be normed (where there is a weight) and turned (where there is a table)."""

    x_NHE: torch.Tensor
    out_NHE: torch.Tensor
    weight_E: torch.Tensor | None
    eps: float
    table: RopeTable | None

    def goes_with(self, other: Turned) -> bool:
        """Whether one launch can do both."""
        return (
            self.table is other.table
            and (self.weight_E is None) == (other.weight_E is None)
            and self.eps == other.eps
            and self.x_NHE.shape[::2] == other.x_NHE.shape[::2]
        )


@attrs.frozen
class Added:
    """A sum."""

    x_ND: torch.Tensor
    y_ND: torch.Tensor
    out_ND: torch.Tensor
