"""Parts of a decoder's configuration (`config.py`) that few families have: latents, experts, names, and what Gemma 3n,
Gemma 4 and Llama 4 have.

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
class InputConfig:
    """The sizes of per-layer inputs (`layer_inputs.py`)."""

    width: int
    """Of each layer's."""
    vocab_size: int
    """Tokens that have one of their own; others have the first token's."""


@attrs.frozen
class Gemma4Config:
    """What the text part of Gemma 4 has beside other decoders."""

    heads: tuple[HeadShape, ...]
    """Of each layer."""
    values_are_keys: bool
    """Whether layers without a window make values of their keys."""
    mlp_widths: tuple[int, ...]
    """Of each layer."""
    inputs: InputConfig | None


@attrs.frozen
class Gemma3nConfig:
    """What the text part of Gemma 3n has beside other decoders."""

    mlp_widths: tuple[int, ...]
    """Of each layer."""
    deviations: tuple[float | None, ...]
    """Of each layer: how many standard deviations above their mean gates are cut off (`Ops.sparse_gelu_mul`); None:
    they are not."""
    num_copies: int
    """Of the hidden state (`altup.py`)..."""
    active: int
    """...of which attention and MLP compute this one."""
    scales_active: bool
    """Whether what a layer makes of it with its input is scaled first, element by element."""
    laurel_rank: int
    inputs: InputConfig


@attrs.frozen
class Temperature:
    """Factors of queries that grow with their positions: `1 + scale * log(1 + floor((position + first) / floor))`."""

    floor: float
    scale: float
    first: int
    """The number of the first position."""


@attrs.frozen
class Llama4Config:
    """What the text part of Llama 4 has beside other decoders, and that its windows are chunks (`Ops.attend`)."""

    norms_heads: bool
    """Whether query and key heads of rotated layers are normed, by weights of 1."""
