"""Operations that are deferred so that one launch can do several (`ops.py`): what they read, and where results go.

What must always hold: their arguments are computed, and are not changed until they are launched.
"""

from __future__ import annotations

import attrs
import torch

from ..ops import RopeTable


@attrs.frozen
class DeferredHeads:
    """Heads to be normed (where there is a weight) and rotated (where there is a table)."""

    x_NHE: torch.Tensor
    out_NHE: torch.Tensor
    weight_E: torch.Tensor | None
    eps: float
    table: RopeTable | None

    def can_share_launch(self, other: DeferredHeads) -> bool:
        """Return whether one launch can compute both."""
        return (
            self.table is other.table
            and (self.weight_E is None) == (other.weight_E is None)
            and self.eps == other.eps
            and self.x_NHE.shape[::2] == other.x_NHE.shape[::2]
        )


@attrs.frozen
class DeferredSum:
    """`x + y`, to be joined with the norm that follows."""

    x_ND: torch.Tensor
    y_ND: torch.Tensor
    out_ND: torch.Tensor
