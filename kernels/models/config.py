"""`config.json` as the decoder families read it, and everything in it that we refuse.

`registry.py` reads it once at load; a family's file takes the numbers from here. A checkpoint that asks for something
we do not compute must never load and answer nonsense: what is not understood is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Llama3Scaling:
    """Llama 3.1's change to low rotary frequencies, as `rope_type: llama3` names it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@attrs.frozen
class DecoderConfig:
    """The numbers of a dense decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """q, k, v and o projections carry a bias."""


def read_config(model_path: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint folder. Raises ValueError where there is none or it is no object."""
    path = model_path / "config.json"
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{model_path} holds no config.json: not a checkpoint in the Hugging Face layout") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def parse_config(data: dict[str, Any], *, architecture: str, default_head_dim: int | None = None) -> DecoderConfig:
    """Check and take what a dense decoder needs.

    `default_head_dim` stands in for an absent `head_dim`; None means hidden size over heads.
    Raises ValueError naming the entry that is missing or that asks for what we do not compute.
    """
    _refuse_what_is_not_computed(data)
    hidden_size, num_heads = _positive(data, "hidden_size"), _positive(data, "num_attention_heads")
    num_kv_heads = _positive(data, "num_key_value_heads", default=num_heads)
    head_dim = _positive(data, "head_dim", default=default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"config.json: {num_heads} attention heads do not divide among {num_kv_heads} key/value heads")
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim {head_dim} is odd, which rotary embedding cannot pair")
    rope_theta, rope_scaling = _parse_rope(data)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_positive(data, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(data, "intermediate_size"),
        num_layers=_positive(data, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=_positive(data, "max_position_embeddings"),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attention_bias", False)),
    )


def check_length(config: DecoderConfig, max_model_len: int) -> None:
    """Raises ValueError for a length beyond the model's positions."""
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} exceeds the model's max_position_embeddings "
            f"{config.max_position_embeddings}"
        )


def _positive(data: dict[str, Any], key: str, *, default: int | None = None) -> int:
    value = data.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} is {value!r}, where a positive integer is needed")
    return value


def _refuse_what_is_not_computed(data: dict[str, Any]) -> None:
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unnamed")
        raise ValueError(f"config.json: quantization_config ({method}) is not supported")
    if data.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {data['hidden_act']!r} is not supported, only 'silu'")
    if data.get("mlp_bias"):
        raise ValueError("config.json: mlp_bias is not supported")
    # `use_sliding_window` false beside a window is how Qwen writes "none"; an absent switch means the window counts.
    if data.get("sliding_window") is not None and data.get("use_sliding_window", True):
        raise ValueError(f"config.json: sliding_window {data['sliding_window']} is not supported")
    other_layers = sorted(set(data.get("layer_types") or ()) - {"full_attention"})
    if other_layers:
        raise ValueError(f"config.json: layer_types {', '.join(other_layers)} not supported, only full_attention")


def _parse_rope(data: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling from either spelling: `rope_parameters` (transformers 5), or `rope_theta` + `rope_scaling`."""
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0)
    if rope.get("partial_rotary_factor", data.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not supported")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("config.json: rope parameters that differ among layers are not supported")
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise ValueError(f"config.json: rope_type {rope_type!r} is not supported, only 'default' and 'llama3'")
    try:
        return theta, Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ValueError(f"config.json: rope_type 'llama3' lacks {error.args[0]}") from None
