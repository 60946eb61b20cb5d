"""`config.json` as the decoder families read it.

`families.py` reads it once at load; a family's file takes the numbers from here, and `refusals.py` refuses what it asks
for and we do not compute: a checkpoint must never load and answer nonsense.

What must always hold: an absent entry means what it means in the architecture's own configuration class, and where that
is a guess about the model's size, the entry has to be there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from .entry_types import check_types, is_deep, is_number, is_whole, shown
from .rope_config import Rope, ShortFactors, YarnScaling


@attrs.frozen
class MoeConfig:
    """A mixture of experts."""

    num_experts: int
    num_chosen: int
    """Experts that a token goes to."""
    intermediate_size: int
    """Of each."""
    normalise: bool
    """The weights of the chosen come to 1."""
    dense_layers: frozenset[int]
    """Those with one MLP for all tokens."""


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The numbers of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    local_rope: Rope
    """Of layers with a window; the same but for Gemma 3."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    windows: tuple[int | None, ...]
    """How many tokens each layer's attention sees, itself among them; None where it sees all."""
    attention_scale: float
    """Of the product of a query and a key."""
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    moe: MoeConfig | None = None


def read_config(model_path: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint folder.

    Raises ValueError where there is none, where it is no object, and for entries of the wrong kind.
    """
    path = model_path / "config.json"
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{model_path} holds no config.json: not a checkpoint in the Hugging Face layout") from None
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
    """What all decoders have, as arguments of `DecoderConfig`.

    `default_head_dim` stands in for an absent `head_dim`; None means hidden size over heads. `every_head_its_kv` says
    that an absent `num_key_value_heads` means as many as there are heads. The last two stand in for absent entries.
    Raises ValueError naming the entry that is missing or wrong.
    """
    hidden_size, num_heads = positive(data, "hidden_size"), positive(data, "num_attention_heads")
    num_kv_heads = positive(data, "num_key_value_heads", default=num_heads if every_head_its_kv else None)
    head_dim = positive(data, "head_dim", default=default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"config.json: {num_heads} attention heads do not divide among {num_kv_heads} key/value heads")
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim {head_dim} is odd, which rotary embedding cannot pair")
    epsilon = positive_number(data, "rms_norm_eps", default=rms_norm_eps)
    if epsilon is None:
        raise ValueError("config.json: rms_norm_eps is null, where a positive number is needed")
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
        "tie_word_embeddings": bool(data.get("tie_word_embeddings", tied)),
    }


def read_windows(data: dict[str, Any], default_types: list[str], default_window: int | None) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types`, else by `default_types`.

    Raises ValueError for other types of layers, for too few, and where a window is wanted but there is none.
    """
    types = data.get("layer_types") or default_types
    other_types = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other_types:
        raise ValueError(
            f"config.json: layer_types {', '.join(map(str, other_types))} not supported, "
            "only full_attention and sliding_attention"
        )
    if len(types) != data["num_hidden_layers"]:
        raise ValueError(f"config.json: layer_types names {len(types)} layers of {data['num_hidden_layers']}")
    if "sliding_attention" not in types:
        return (None,) * len(types)
    if data.get("sliding_window", default_window) is None:
        raise ValueError("config.json: layer_types wants a sliding_window, and there is none")
    window = positive(data, "sliding_window", default=default_window)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_qwen_windows(data: dict[str, Any]) -> tuple[int | None, ...]:
    """A window only where `use_sliding_window` asks for one: by `layer_types`, else from `max_window_layers` on."""
    num_layers = positive(data, "num_hidden_layers")
    if not data.get("use_sliding_window"):
        return same_window(data, None)
    if data.get("sliding_window", 4096) is None:
        return same_window(data, None)
    full = data.get("max_window_layers", 28)
    if not isinstance(full, int) or isinstance(full, bool):
        raise ValueError(f"config.json: max_window_layers is {full!r}, where an integer is needed")
    kinds = ["full_attention" if index < full else "sliding_attention" for index in range(num_layers)]
    return read_windows(data, kinds, 4096)


def same_window(data: dict[str, Any], window: int | None) -> tuple[int | None, ...]:
    """One window, or none, for all layers. Raises ValueError where `layer_types` says otherwise."""
    kind = "full_attention" if window is None else "sliding_attention"
    others = sorted(set(data.get("layer_types") or ()) - {kind})
    if others:
        named = ", ".join(map(str, others))
        raise ValueError(f"config.json: layer_types {named} not supported for this architecture, only {kind}")
    return read_windows(data, [kind] * positive(data, "num_hidden_layers"), window)


def check_length(config: DecoderConfig, max_model_len: int) -> None:
    """Raises ValueError for a length beyond the model's positions, those that YaRN adds among them."""
    longest, scaling = config.max_position_embeddings, config.rope.scaling
    if isinstance(scaling, YarnScaling):
        longest = max(longest, int(scaling.factor * scaling.original_max_position_embeddings))
    if max_model_len > longest:
        raise ValueError(f"max_model_len {max_model_len} exceeds the model's max_position_embeddings {longest}")
    if isinstance(scaling, ShortFactors) and max_model_len > scaling.original_max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} exceeds original_max_position_embeddings "
            f"{scaling.original_max_position_embeddings}: past it rope_type 'longrope' turns earlier tokens otherwise, "
            "which no cached prefix survives; choose a max_model_len up to it"
        )


_MOST_OF = {"num_hidden_layers": 10_000}
"""Of what is counted out one by one."""


def positive(data: dict[str, Any], key: str, *, default: int | None = None) -> int:
    """A positive integer. Raises ValueError naming the entry."""
    value = data.get(key)
    if value is None:
        value = default
    if value is None or not is_whole(value) or value <= 0:
        raise ValueError(f"config.json: {key} is {shown(value)}, where a positive integer is needed")
    if value > _MOST_OF.get(key, value):
        raise ValueError(f"config.json: {key} is {value}, more than {_MOST_OF[key]}")
    return value


def positive_number(data: dict[str, Any], key: str, *, default: float | None) -> float | None:
    """A positive number, or None where the entry is null. Raises ValueError naming the entry."""
    value = data.get(key, default)
    if value is None:
        return None
    if not is_number(value) or value <= 0:
        raise ValueError(f"config.json: {key} is {shown(value)}, where a positive number is needed")
    return float(value)
