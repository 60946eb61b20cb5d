"""The operations that a model is written in: what `models/` calls, and what a backend has to bring.

An `Ops` knows the batch (positions, block tables), so a model only says what to compute. The plain-torch one is
`reference/ops.py`, the oracle of any other, made once a pass; `cpu/recorder.py` runs a model once and writes down what
it asks for. So a model calls nothing but these, and torch only to look at results in other shapes (view, split).

Tensor names end in their shape, one letter a dimension:

    N  tokens of the pass (padded as the backend likes)     D  hidden size          V  vocabulary
    H  query heads                                          F  MLP size (2F: gate and up side by side)
    K  key/value heads                                      I, O  inputs and outputs of a linear layer
    E  head dimension (R: half of it)                       B  physical blocks      S  slots of a block

What must always hold: where the backend calls itself invariant, row n of every result depends on row n of the
arguments (and, in `attend`, on the KV of its own sequence) and on nothing else, to the bit.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quipu.kernels.models.rope import RopeTable


class Ops(Protocol):
    """One pass's operations."""

    def embed(self, token_ids_N: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Rows of the table: x_ND."""
        ...

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`: y_NO."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) over the last dimension, in float32 inside; any rank."""
        ...

    def rope(self, x_NHE: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """Rotary embedding (Su et al., arXiv:2104.09864), pairing element r with r + R as Hugging Face does.

        Each token is turned by the table's row of its position.
        """
        ...

    def write_kv(self, layer: int, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> None:
        """Put this pass's keys and values where the block tables say."""
        ...

    def attend(self, layer: int, q_NHE: torch.Tensor) -> torch.Tensor:
        """Causal attention of each token to its own sequence, after `write_kv` of the layer: o_NHE.

        Scores are scaled by E**-0.5. Consecutive groups of H/K query heads share a key/value head.
        """
        ...

    def silu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`: h_NF."""
        ...

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        """`x + y`, of one shape."""
        ...
