"""The operations that models are written in: `models/` calls them, every backend implements them.

An `Ops` knows the batch (positions, block tables), so a model only says what to compute. `reference/ops.py`, in plain
torch, is the oracle of all others and is made for each pass; `cpu/recorder.py` runs a model once and records the
operations. A model therefore calls nothing else, and uses torch only to reshape results (view, split).

Tensor names end in their shape, one letter per dimension:

    N  tokens of the pass (padded as the backend likes)     D  hidden size          V  vocabulary
    H  query heads                                          F  MLP size (2F: gate and up side by side)
    K  key/value heads                                      I, O  inputs and outputs of a linear layer
    E  head dimension                                       B  physical blocks      S  slots of a block
    R  half of the rotated elements of a head              X  experts (T: those chosen for a token)
    C  copies of a hidden state, side by side              J  those that are added to each

What must always hold: if the backend is invariant, the bits of row n of every result depend on row n of the arguments
(and, in `attend`, on the KV of its own sequence) and on nothing else.
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
    is_interleaved: bool = False
    """Whether elements 2r and 2r + 1 are a pair, else r and r + R."""

    def at(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(cos_NR, sin_NR)`. Raises IndexError past the table."""
        return self.cos_PR[positions_N], self.sin_PR[positions_N]


@attrs.frozen
class SwigluClamp:
    """The activation of gpt-oss: `g * sigmoid(alpha * g) * (u + 1)`.

    g is the gate, at most `limit`; u is up, at most that in either direction.
    """

    alpha: float
    limit: float


@attrs.frozen(eq=False)
class ExpertBiases:
    """The biases of experts' matrices: one row per expert, in the backend's memory."""

    gate_up_XO: torch.Tensor
    down_XD: torch.Tensor


@attrs.frozen(eq=False)
class Choice:
    """How a router chooses experts, where it differs from the largest scores and their softmax (DeepSeek)."""

    is_sigmoid: bool = False
    """Whether the sigmoids of scores are weights, else their softmax over all experts."""
    scales_inputs: bool = False
    """Whether an expert's input is multiplied with its weight, instead of its result. Then the largest scores are
    chosen, as without `is_sigmoid`."""
    bias_X: torch.Tensor | None = None
    """Added to weights where experts are chosen, in float32, but not to the weights of those chosen."""
    num_groups: int = 1
    """Groups of as many experts..."""
    num_chosen_groups: int = 1
    """...of which so many may be chosen from: those with the largest weight, or sum of two sigmoids with their bias."""
    factor: float = 1.0
    """Of the weights of those chosen."""
    scale_X: torch.Tensor | None = None
    """Likewise, of each expert."""
    mixer_range: float | None = None
    """If the weights are SparseMixer's (Liu et al., arXiv:2409.12136), which chooses one expert after the other. The
    weight of each is its softmax over the scores that are left and as close to its own, s: where s - x, of another
    score x, does not exceed this times max(|x|, s)."""


@attrs.frozen(eq=False)
class Experts:
    """The MLPs of a mixture of experts: one matrix of each kind per expert, as `Weights` returned them."""

    gate_up_OD: list[torch.Tensor]
    down_DF: list[torch.Tensor]
    num_chosen: int
    """Experts per token."""
    normalise: bool
    """Whether the weights of the chosen experts are normalised to sum to 1."""
    choice: Choice = Choice()
    biases: ExpertBiases | None = None
    clamp: SwigluClamp | None = None
    """None: the activation is SiLU..."""
    is_gelu: bool = False
    """...or GELU in its tanh form."""


class Ops(Protocol):
    """The operations of one pass."""

    def embed(
        self, token_ids_N: torch.Tensor, table_VD: torch.Tensor, scale: float = 1.0, *, is_exact: bool = False
    ) -> torch.Tensor:
        """Look up rows of the table, times `scale`: x_ND. A token beyond the table has its first row.

        The scale is rounded to the model's dtype, as Gemma was trained, unless it `is_exact`.
        """
        ...

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `x @ weight.T + bias`: y_NO."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Apply RMSNorm (Zhang and Sennrich, arXiv:1910.07467) over the last dimension, in float32.

        `x` is `[N, D]` (whole rows, such as a norm over the whole query projection) or `[N, H, E]` (each head).
        """
        ...

    def layer_norm(
        self, x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Apply LayerNorm (Ba et al., arXiv:1607.06450) to rows, in float32: y_ND."""
        ...

    def norm_latent(self, x_NI: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Apply RMSNorm to the first elements of each row, as many as `weight` has; move the others before them: y_NI.

        This is a key of latent attention (DeepSeek-AI, arXiv:2405.04434): what is to be rotated, and the latent.
        """
        ...

    def linear_heads(self, x_NHE: torch.Tensor, weights_OI: list[torch.Tensor], *, first: int = 0) -> torch.Tensor:
        """Multiply I elements of each head, from `first` on, with its own matrix; move those after them before: y_NHO.

        The moved elements and the O of the product are a head of the result.
        """
        ...

    def rope(self, x_NHE: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """Apply rotary embedding (Su et al., arXiv:2104.09864) to pairs of elements, as the table says.

        Each token is rotated by the table's row of its position. The elements of a head from 2R on are unchanged.
        """
        ...

    def write_kv(self, layer: int, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> None:
        """Write this pass's keys and values to the cache by the block tables.

        If the cache has one vector for both (`BlockShape.is_latent`), `v_NKE` is `k_NKE`.
        """
        ...

    def attend(
        self,
        layer: int,
        q_NHE: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        in_chunks: bool = False,
        soft_cap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute causal attention of each token to its own sequence, after `write_kv` of the layer: o_NHE.

        A score is q.k * `scale`; a soft cap c turns it into c * tanh(score / c). With a window w a token sees the last
        w tokens only, including itself; with `in_chunks` those of its own chunk of w, which begin at multiples of w.
        Consecutive groups of H/K query heads share a key/value head. A head's sink is a score that joins the sum by
        which weights are divided, but has no value (Xiao et al., arXiv:2309.17453).
        """
        ...

    def silu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        """Compute `silu(gate) * up`: h_NF."""
        ...

    def gelu_mul(self, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        """Compute `gelu(gate) * up` with the tanh form of GELU (Hendrycks and Gimpel, arXiv:1606.08415): h_NF."""
        ...

    def sparse_gelu_mul(self, gate_up_N2F: torch.Tensor, deviations: float) -> torch.Tensor:
        """Compute `gelu(max(gate - cutoff, 0)) * up` with the tanh form of GELU: h_NF.

        A row's cutoff is the mean of its gate plus so many of its standard deviations, in float32: nearly all gates of
        a row are to be 0.
        """
        ...

    def gelu(self, x_NF: torch.Tensor) -> torch.Tensor:
        """Compute GELU in its tanh form, of something without a gate: h_NF."""
        ...

    def sigmoid_mul(self, x_ND: torch.Tensor, score_N1: torch.Tensor) -> torch.Tensor:
        """Compute `sigmoid(score) * x`, with one score per row: y_ND."""
        ...

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        """Compute `x + y`, of the same shape."""
        ...

    def mul(self, x_NF: torch.Tensor, y_NF: torch.Tensor) -> torch.Tensor:
        """Compute `x * y`, of the same shape; y may be some columns of a wider result."""
        ...

    def scale(self, x_ND: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Compute `x * factor`: one number of the model, or one for each column."""
        ...

    def match_copies(self, x_ND: torch.Tensor, y_NCD: torch.Tensor, floor: float) -> torch.Tensor:
        """Return x, and behind it each copy in y, scaled to the root mean square of x: z_N(1+C)D.

        The mean square of a copy counts as at least `floor`.
        """
        ...

    def mix_copies(self, x_NCD: torch.Tensor, weights: torch.Tensor, z_NJD: torch.Tensor) -> torch.Tensor:
        """Add a weighted sum to each copy, `x_c + w_c1 * z_1 + w_c2 * z_2 + ...`: y_NCD.

        Weights are results, `[N, C, J]`, or those of the model, `[C, J]` (AltUp: Baykal et al., arXiv:2301.13310).
        """
        ...

    def soft_cap(self, x_NV: torch.Tensor, cap: float) -> torch.Tensor:
        """Compute `cap * tanh(x / cap)`."""
        ...

    def experts(self, x_ND: torch.Tensor, router_NX: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Compute each token's weighted sum over the experts that its router scores choose: y_ND.

        The softmax of a row's scores is over all experts; ties choose the lower index. Experts are summed in the order
        in which they are chosen, by descending score (Qwen Team, arXiv:2505.09388; Shazeer et al., arXiv:1701.06538).
        """
        ...
