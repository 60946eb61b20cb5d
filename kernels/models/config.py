"""The decoder families' view of `config.json`.

A family's `parse_*` builds a `DecoderConfig` with the functions here. `refusals.py` refuses what is not computed: a
checkpoint must never load and answer nonsense.

What must always hold: an absent entry has the default of the architecture's own configuration class; if that default is
the size of one particular model, the entry is required.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import attrs

from .config_parts import (
    Gemma3nConfig,
    Gemma4Config,
    HeadShape,
    LatentConfig,
    Llama4Config,
    MlpNames,
    MoeConfig,
    Temperature,
)
from .entry_types import check_types, is_deep, is_number, is_whole, shown
from .rope_config import Rope, ShortFactors, YarnScaling


@attrs.frozen
class NormNames:
    """Where a layer norms, by the names of the weights in a checkpoint; None: not there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The configuration of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    rope: Rope
    local_rope: Rope = attrs.field(default=attrs.Factory(lambda config: config.rope, takes_self=True))
    """Of layers with a window; differs from `rope` for Gemma 3 and OLMo 3 only."""
    unrotated: frozenset[int] = frozenset()
    """Layers without a rotary embedding."""
    windows: tuple[int | None, ...]
    """How many tokens each layer's attention sees, the token itself included; None: all."""
    norms: NormNames = NormNames()
    norms_center: bool = False
    """Whether norms of layers subtract the mean (LayerNorm)..."""
    norms_have_biases: bool = False
    """...and add a bias."""
    is_parallel: bool = False
    """Whether attention and MLP read the same norm, `before_attention`."""
    adds_one_to_norms: bool = False
    """Whether a checkpoint stores w for norms by 1 + w."""
    norms_heads: bool = False
    """Whether query and key heads are normed before they are rotated..."""
    norms_projections: bool = False
    """...or all query heads of a token together, and all key heads."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the MLP; `gelu` in its tanh form."""
    mlp_is_gated: bool = True
    """Whether what is activated is multiplied with another product, else MLPs are those of StarCoder2..."""
    mlp_bias: bool = False
    """...whose products may have biases."""
    embed_scale: float = 1.0
    """Factor of embeddings."""
    embed_scale_is_exact: bool = False
    """Whether that factor is not rounded to the model's dtype."""
    logits_divisor: float = 1.0
    qkv_is_stored_fused: bool = False
    """Whether a checkpoint has q, k and v in one matrix."""
    mlp_name: str = "mlp"
    """What a checkpoint calls a layer's MLP, or what its router and experts are in..."""
    mlp_names: MlpNames = attrs.field(factory=MlpNames)
    """...and the matrices of an MLP."""
    head_bias: bool = False
    attention_scale: float = attrs.field(default=attrs.Factory(lambda config: config.head_dim**-0.5, takes_self=True))
    """Factor of the product of query and key."""
    attention_soft_cap: float | None = None
    temperature: Temperature | None = None
    """Of queries: of layers that are not rotated, if there are some, else of all."""
    has_sinks: bool = False
    """Whether each query head has a sink; see `Ops.attend`."""
    logits_soft_cap: float | None = None
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    """If attention is over latents; then one key, of `head_dim` elements, is that of all heads, and their value."""
    cached: tuple[int, ...] = attrs.field(
        default=attrs.Factory(lambda config: tuple(range(config.num_layers)), takes_self=True)
    )
    """To whose keys each layer attends: to its own, or to those of one before the first that has none."""
    gemma3n: Gemma3nConfig | None = None
    gemma4: Gemma4Config | None = None
    llama4: Llama4Config | None = None
    num_ignored_layers: int = 0
    """Layers of the checkpoint, after the last, that are not read."""

    @property
    def num_cached(self) -> int:
        """Return how many layers have keys of their own: the first ones."""
        return max(self.cached) + 1

    @property
    def heads_of_layers(self) -> tuple[HeadShape, ...]:
        """Return the key/value heads of each layer that has keys of its own."""
        alike = (HeadShape(self.num_kv_heads, self.head_dim),) * self.num_layers
        return (alike if self.gemma4 is None else self.gemma4.heads)[: self.num_cached]


def read_config(model_path: Path) -> dict[str, Any]:
    """Read and parse the `config.json` of a checkpoint folder.

    Raises ValueError if it is missing or not a JSON object, and for entries of a wrong type.
    """
    path = model_path / "config.json"
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{model_path} has no config.json, so it is not a checkpoint in the Hugging Face layout"
        ) from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    if is_deep(data):
        raise ValueError(f"{path} is nested too deeply")
    check_types(data)
    return data


def read_sizes(
    data: dict[str, Any],
    *,
    default_head_dim: int | None = None,
    every_head_its_kv: bool = False,
    rms_norm_eps: float = 1e-6,
    tied: bool = False,
) -> dict[str, Any]:
    """Read the entries that all decoders have, as arguments of `DecoderConfig`.

    The keyword arguments are defaults of absent entries. `default_head_dim` None means hidden size over heads;
    `every_head_its_kv` makes `num_key_value_heads` default to the number of heads. Raises ValueError naming the entry
    that is missing or wrong.
    """
    hidden_size, num_heads = positive(data, "hidden_size"), positive(data, "num_attention_heads")
    num_kv_heads = positive(data, "num_key_value_heads", default=num_heads if every_head_its_kv else None)
    head_dim = positive(data, "head_dim", default=default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads is {num_heads}, must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim is {head_dim}, must be even for rotary embedding")
    epsilon = positive_number(data, "rms_norm_eps", default=rms_norm_eps)
    if epsilon is None:
        raise ValueError("config.json: rms_norm_eps is null, must be a positive number")
    bias = flag(data, "attention_bias", default=False)
    return {
        "vocab_size": positive(data, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive(data, "intermediate_size"),
        "num_layers": positive(data, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": epsilon,
        "max_position_embeddings": positive(data, "max_position_embeddings"),
        "tie_word_embeddings": flag(data, "tie_word_embeddings", default=tied),
        "qkv_bias": bias,
        "o_bias": bias,
    }


def read_windows(data: dict[str, Any], default_types: list[str], default_window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window: by `layer_types`, else by `default_types`.

    Raises ValueError for other types or a wrong number of layers, and for windowed layers without `sliding_window`.
    """
    types = data.get("layer_types") or default_types
    other_types = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other_types:
        raise ValueError(
            f"config.json: layer_types {', '.join(map(str, other_types))} not supported, "
            "only full_attention and sliding_attention"
        )
    if len(types) != data["num_hidden_layers"]:
        raise ValueError(f"config.json: layer_types has {len(types)} entries for {data['num_hidden_layers']} layers")
    if "sliding_attention" not in types:
        return (None,) * len(types)
    if data.get("sliding_window", default_window) is None:
        raise ValueError("config.json: sliding_window is null, but layer_types has sliding_attention")
    window = positive(data, "sliding_window", default=default_window)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def every_nth_full(num_layers: int, every: int) -> list[str]:
    """Return types of layers, of which every n-th has no window."""
    return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(num_layers)]


def same_window(data: dict[str, Any], window: int | None) -> tuple[int | None, ...]:
    """Return the same window, or none, for all layers. Raises ValueError if `layer_types` contradicts."""
    kind = "full_attention" if window is None else "sliding_attention"
    others = sorted(set(data.get("layer_types") or ()) - {kind})
    if others:
        named = ", ".join(map(str, others))
        raise ValueError(f"config.json: layer_types {named} not supported for this architecture, only {kind}")
    return read_windows(data, [kind] * positive(data, "num_hidden_layers"), window)


def check_length(config: DecoderConfig, max_model_len: int) -> None:
    """Raises ValueError for a length beyond the model's positions, including those that YaRN adds."""
    longest, scaling = config.max_position_embeddings, config.rope.scaling
    if isinstance(scaling, YarnScaling):
        longest = max(longest, int(scaling.factor * scaling.original_max_position_embeddings))
    if max_model_len > longest:
        raise ValueError(f"max_model_len {max_model_len} exceeds the model's max_position_embeddings {longest}")
    if isinstance(scaling, ShortFactors) and max_model_len > scaling.original_max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} exceeds original_max_position_embeddings "
            f"{scaling.original_max_position_embeddings}: beyond it rope_type 'longrope' changes the rotation of "
            "earlier tokens, which invalidates cached prefixes; choose a max_model_len up to it"
        )


def read_flags(data: dict[str, Any], key: str, default: list[bool]) -> list[bool]:
    """Read a list with an entry for each layer, or more. Raises ValueError naming the entry."""
    value = data.get(key)
    if value is None:
        return default
    if len(value) < len(default):
        raise ValueError(f"config.json: {key} has {len(value)} entries for {len(default)} layers")
    return [bool(one) for one in value[: len(default)]]


_MOST_OF = {"num_hidden_layers": 10_000}
"""Upper bounds of entries over which we loop."""


def flag(data: dict[str, Any], key: str, *, default: bool) -> bool:
    """Read true or false. Null is false, as in transformers, unless true is the default.

    Raises ValueError for null in the place of true: transformers refuses it, and computed with false before it did.
    """
    value = data.get(key, default)
    if value is None and default:
        raise ValueError(f"config.json: {key} is null, must be true or false")
    return bool(value)


def positive(data: dict[str, Any], key: str, *, default: int | None = None) -> int:
    """Read a positive integer. Raises ValueError naming the entry."""
    value = data.get(key)
    if value is None:
        value = default
    if value is None or not is_whole(value) or value <= 0:
        raise ValueError(f"config.json: {key} is {shown(value)}, must be a positive integer")
    if value > _MOST_OF.get(key, value):
        raise ValueError(f"config.json: {key} is {value}, must be at most {_MOST_OF[key]}")
    return value


def whole(data: dict[str, Any], key: str) -> int:
    """Read an integer of at least 0. Raises ValueError naming the entry."""
    value = data.get(key)
    if value is None or not is_whole(value) or value < 0:
        raise ValueError(f"config.json: {key} is {shown(value)}, must be an integer of at least 0")
    return int(value)


def positive_number(data: dict[str, Any], key: str, *, default: float | None) -> float | None:
    """Read a positive number, or None if the entry is null. Raises ValueError naming the entry."""
    value = data.get(key, default)
    if value is None:
        return None
    if not is_number(value) or value <= 0:
        raise ValueError(f"config.json: {key} is {shown(value)}, must be a positive number")
    return float(value)
