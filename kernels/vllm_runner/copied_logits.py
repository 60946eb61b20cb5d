"""Copies of logits that rules may change, in memory that is kept from one pass to the next.

`logit_sampler.py` has one. Mapping memory for 32 rows of 150,000 logits anew takes longer than copying them.

What must always hold: the runner's own logits stay as they are; a copy is valid until the next one is made.
"""

from __future__ import annotations

import torch

KEPT_ROWS = 64
"""Of a pass with more rows, the memory is not kept."""


class CopiedLogits:
    """The memory."""

    def __init__(self) -> None:
        self._kept_RV = torch.empty(0, 0)

    def of(self, logits_PV: torch.Tensor, places: list[int]) -> torch.Tensor:
        """Return the logits at these places on the host, in float32."""
        if places != list(range(len(logits_PV))):
            logits_PV = logits_PV[places]
        copy_MV = self._kept_RV[: len(places)]
        if copy_MV.shape != logits_PV.shape:
            copy_MV = torch.empty(logits_PV.shape)
            if len(places) <= KEPT_ROWS:
                self._kept_RV = copy_MV
        return copy_MV.copy_(logits_PV)
