"""The operations that a model is written in: what `models/` calls, and what a backend has to bring.

An `Ops` knows the batch (positions, block tables), so a model only says what to compute. The plain-torch one is
`reference/ops.py`, the oracle of any other, made once a pass; `cpu/recorder.py` runs a model once and writes down what
it asks for. So a model calls nothing but these, and torch only to look at results in other shapes (view, split).

Tensor names end in their shape, one letter a dimension:

    N  tokens of the pass (padded as the backend likes)     D  hidden size          V  vocabulary
    H  query heads                                          F  MLP size (2F: gate and up side by side)
    K  key/value heads                                      I, O  inputs and outputs of a linear layer
    E  head dimension                                       B  physical blocks      S  slots of a block
    R  half of the elements of a head that are turned       X  experts (T: those that a token goes to)

What must always hold: where the backend calls itself invariant, row n of every result depends on row n of the
arguments (and, in `attend`, on the KV of its own sequence) and on nothing else, to the bit.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import torch


@attrs.frozen(eq=False)
class RopeTable:
    """Cosines and sines of the rotary embedding in float32, one row a position from 0 (P). `models/rope.py` makes them.

    R is half of the elements that are rotated, which may be fewer than a head has.
    """

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def at(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(cos_NR, sin_NR)`. Raises IndexError past the table."""
        return self.cos_PR[positions_N], self.sin_PR[positions_N]


@attrs.frozen(eq=False)
class Experts:
    """The MLPs of a mixture of experts: one matrix of each kind an expert, as `Weights` gave them."""

    gate_up_OD: list[torch.Tensor]
    down_DF: list[torch.Tensor]
    num_chosen: int
    """Experts that a token goes to."""
    normalise: bool
    """The weights of the chosen come to 1, rather than to their share of all."""


class Ops(Protocol):
    """One pass's operations."""

    def embed(self, token_ids_N: torch.Tensor, table_VD: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows of the table times `scale`, which is rounded to the model's dtype first, as Gemma was trained: x_ND."""
        ...

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`: y_NO."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) over the last dimension, in float32 inside; any rank."""
        ...

    def rope(self, x_NHE: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """Rotary embedding (Su et al., arXiv:2104.09864), pairing element r with r + R as Hugging Face does.

        Each token is turned by the table's row of its position. A table narrower than half a head leaves what follows
        its 2R elements as it is.
        """
        ...

    def write_kv(self, layer: int, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> None:
        """Put this pass's keys and values where the block tables say."""
        ...

    def attend(
        self,
        layer: int,
        q_NHE: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of each token to its own sequence, after `write_kv` of the layer: o_NHE.

        A score is q.k * `scale`, and with a soft cap c that becomes c * tanh(score / c). With a window w a token sees
        the last w tokens only, itself among them. Consecutive groups of H/K query heads share a key/value head.
        """
        ...

    def silu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`: h_NF."""
        ...

    def gelu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        """`gelu(gate) * up` with the tanh form of GELU (Hendrycks and Gimpel, arXiv:1606.08415): h_NF."""
        ...

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        """`x + y`, of one shape."""
        ...

    def soft_cap(self, x_NV: torch.Tensor, cap: float) -> torch.Tensor:
        """`cap * tanh(x / cap)`."""
        ...

    def experts(self, x_ND: torch.Tensor, router_NX: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Each token's weighted sum over the experts that its router scores choose, with SiLU between: y_ND.

        The softmax of a row's scores is taken over all experts; of two equal ones the lower number is chosen first.
        The sum goes from the highest weight down (Qwen Team, arXiv:2505.09388; Shazeer et al., arXiv:1701.06538).
        """
        ...
