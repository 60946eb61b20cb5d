"""Parts of a decoder's configuration (`config.py`) that few families have: latents, experts, names, and what Gemma 4
and Llama 4 have.

What must always hold: as in `config.py`.
"""

from __future__ import annotations

import attrs

from ..ops import SwigluClamp


@attrs.frozen
class ExpertChoice:
    """How a router chooses experts, where it differs from the largest scores; see `ops.Choice`."""

    is_sigmoid: bool = False
    """Whether weights are sigmoids of scores, and each expert has a bias for being chosen..."""
    scales_inputs: bool = False
    """...which it has not, if what an expert reads is multiplied with its weight, instead of its result."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    factor: float = 1.0
    mixer_range: float | None = None
    """Of SparseMixer; None: weights are of all experts."""


@attrs.frozen
class MlpNames:
    """What a checkpoint calls the matrices of an MLP."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None
    """Of both in one matrix; None: each has its own."""


@attrs.frozen
class MoeConfig:
    """A mixture of experts."""

    num_experts: int
    num_chosen: int
    """Experts per token."""
    intermediate_size: int
    """Of each expert."""
    normalise: bool
    """Whether the weights of the chosen experts are normalised to 1."""
    dense_layers: frozenset[int]
    """Layers with a dense MLP instead of experts."""
    shared_intermediate_size: int | None = None
    """Of the expert that all tokens have in addition; None: there is none."""
    scores_shared: bool = True
    """Whether that expert's result is multiplied with the sigmoid of a score of its own."""
    choice: ExpertChoice = attrs.field(factory=ExpertChoice)
    has_biases: bool = False
    """Whether the router and the experts have them."""
    router_name: str = "gate"
    """In checkpoints, beside the experts..."""
    names: MlpNames = attrs.field(factory=MlpNames)
    """...whose matrices are called so..."""
    shared_name: str = "mlp.shared_experts"
    """...and the expert that all tokens have, in the layer..."""
    shared_names: MlpNames = attrs.field(factory=MlpNames)
    """...with these."""
    clamp: SwigluClamp | None = None
    """None: the activation is SiLU."""


@attrs.frozen
class LatentConfig:
    """The sizes of latent attention (`latent.py`), in elements."""

    width: int
    """Of the latent of keys and values."""
    query_width: int | None
    """Of the latent of queries; None: they have none."""
    unrotated: int
    """Of each head's query: what is multiplied with what its matrix makes of the latent..."""
    rotated: int
    """...and what is rotated."""
    value: int
    """Of each head's value."""
    eps: float
    """Of the latents' norms."""

    @property
    def key(self) -> int:
        """What the cache holds of a token: what is rotated, and the latent."""
        return self.rotated + self.width


@attrs.frozen
class HeadShape:
    """The key/value heads of a layer."""

    num_kv_heads: int
    head_dim: int


@attrs.frozen
class Gemma4Config:
    """What the text part of Gemma 4 has beside other decoders."""

    heads: tuple[HeadShape, ...]
    """Of each layer."""
    cached: tuple[int, ...]
    """To whose keys each layer attends: to its own, or to those of one before the first that has none."""
    values_are_keys: bool
    """Whether layers without a window make values of their keys."""
    wide_mlps: bool
    """Whether layers without keys of their own have MLPs of twice the width."""
    input_width: int | None
    """Of the per-layer input of each layer; None: there are none."""
    input_vocab_size: int

    @property
    def num_cached(self) -> int:
        """Return how many layers have keys of their own: the first ones."""
        return max(self.cached) + 1

    def mlp_width(self, index: int, width: int) -> int:
        """Return the width of a layer's MLP, where that of the first one is `width`."""
        return 2 * width if self.wide_mlps and self.cached[index] != index else width


@attrs.frozen
class Temperature:
    """Factors of queries that grow with their positions: `1 + scale * log(1 + floor((position + 1) / floor))`."""

    floor: float
    scale: float


@attrs.frozen
class Llama4Config:
    """What the text part of Llama 4 has beside other decoders, and that its windows are chunks (`Ops.attend`)."""

    norms_heads: bool
    """Whether query and key heads of rotated layers are normed, by weights of 1."""
    temperature: Temperature | None
    """Of the queries of layers that are not rotated."""
