"""Parts of a decoder's configuration (`config.py`) that few families have: latents, experts in groups, names, and what
Gemma 4 has.

What must always hold: as in `config.py`.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class ExpertChoice:
    """How a router chooses experts, where it differs from the largest scores; see `ops.Choice`."""

    is_sigmoid: bool = False
    """Whether weights are sigmoids of scores, and each expert has a bias for being chosen."""
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
