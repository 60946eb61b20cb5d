"""The reference's operations for its profile run: slow ones allocate their results but compute nothing."""

from __future__ import annotations

from typing import Any

import torch

from .ops import ReferenceOps


class EmptyOps(ReferenceOps):
    """Returns zeros for products, attention and experts; all else is computed as usual."""

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return x_NI.new_zeros((x_NI.shape[0], weight_OI.shape[0]))

    def attend(self, layer: int, q_NHE: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(q_NHE, memory_format=torch.contiguous_format)

    def experts(self, x_ND: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(x_ND)
