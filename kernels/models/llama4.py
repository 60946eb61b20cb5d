"""The configuration of Llama 4's text part (Meta, "The Llama 4 herd", 2025). `decoder_model.py` computes it.

A mixture of experts, all or some layers, whose inputs are multiplied with the sigmoids of their scores; beside it an
expert that all tokens have. Most layers see chunks (a token sees those of its own chunk before it), rotate pairs of
neighbours, and norm query and key heads; the others see all, are not rotated, and may scale queries by position.
"""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, flag, positive, positive_number, read_flags, read_sizes
from .config_parts import ExpertChoice, Llama4Config, MoeConfig, Temperature
from .rope_config import Rope, ShortFactors, YarnScaling, parse_rope

_CHUNKS, _ALL = "chunked_attention", "full_attention"
_MLP = "feed_forward"


def parse_llama4(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. Layers without a rotary embedding are 0 in `no_rope_layers`; by default every fourth.

    By default those with one see chunks. `intermediate_size` is that of experts, `intermediate_size_mlp` of dense
    layers.
    """
    sizes = read_sizes(data, default_head_dim=128, rms_norm_eps=1e-5)
    num_layers = sizes["num_layers"]
    every = positive(data, "no_rope_layer_interval", default=4)
    usual = [(index + 1) % every != 0 for index in range(num_layers)]
    rotated = read_flags({"no_rope_layers": data.get("no_rope_layers") or None}, "no_rope_layers", usual)
    rope = parse_rope(data, head_dim=sizes["head_dim"], default_theta=500_000.0, is_interleaved=True)
    norms_heads = flag(data, "use_qk_norm", default=True)
    if norms_heads:
        _check_rope(rope)
    return DecoderConfig(
        **{**sizes, "intermediate_size": positive(data, "intermediate_size_mlp")},
        rope=rope,
        unrotated=frozenset(index for index, is_rotated in enumerate(rotated) if not is_rotated),
        windows=_read_chunks(data, rotated),
        mlp_name=_MLP,
        moe=_parse_moe(data, sizes["intermediate_size"], num_layers),
        temperature=_read_temperature(data) if not all(rotated) else None,
        llama4=Llama4Config(norms_heads=norms_heads),
    )


def _check_rope(rope: Rope) -> None:
    """Raises ValueError for a rotation that also stretches: we norm before it, the model after, which undoes that."""
    if isinstance(rope.scaling, YarnScaling | ShortFactors) and rope.scaling.attention_factor != 1.0:
        raise ValueError(
            f"config.json: an attention_factor of {rope.scaling.attention_factor} is not supported with use_qk_norm"
        )


def _read_chunks(data: dict[str, Any], rotated: list[bool]) -> tuple[int | None, ...]:
    """Return the size of each layer's chunks; None: it sees all. Raises ValueError."""
    kinds = list(data.get("layer_types") or (_CHUNKS if one else _ALL for one in rotated))
    if others := sorted(set(kinds) - {_ALL, _CHUNKS}):
        raise ValueError(f"config.json: layer_types {', '.join(others)} not supported, only {_ALL} and {_CHUNKS}")
    if len(kinds) != len(rotated):
        raise ValueError(f"config.json: layer_types has {len(kinds)} entries for {len(rotated)} layers")
    if _CHUNKS in kinds and data.get("attention_chunk_size", 0) is None:
        raise ValueError(f"config.json: attention_chunk_size is null, but layer_types has {_CHUNKS}")
    size = positive(data, "attention_chunk_size", default=8192)
    return tuple(size if kind == _CHUNKS else None for kind in kinds)


def _read_temperature(data: dict[str, Any]) -> Temperature | None:
    if not flag(data, "attn_temperature_tuning", default=True):
        return None
    floor = positive_number(data, "floor_scale", default=8192)
    scale = positive_number(data, "attn_scale", default=0.1)
    if floor is None or scale is None:
        raise ValueError("config.json: floor_scale and attn_scale must be positive numbers, not null")
    return Temperature(floor, scale, first=1)


def _parse_moe(data: dict[str, Any], intermediate_size: int, num_layers: int) -> MoeConfig:
    """Parse the mixture, in all layers of `moe_layers`, else in every n-th (`interleave_moe_layer_step`)."""
    num_experts = positive(data, "num_local_experts")
    num_chosen = positive(data, "num_experts_per_tok", default=1)
    if num_chosen > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {num_chosen}, must not exceed num_local_experts {num_experts}"
        )
    step = positive(data, "interleave_moe_layer_step", default=1)
    mixed = data.get("moe_layers")
    if mixed is None:
        mixed = range(step - 1, num_layers, step)
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=intermediate_size,
        normalise=False,
        dense_layers=frozenset(range(num_layers)) - frozenset(mixed),
        shared_intermediate_size=intermediate_size,
        scores_shared=False,
        choice=ExpertChoice(is_sigmoid=True, scales_inputs=True),
        router_name="router",
        shared_name=f"{_MLP}.shared_expert",
    )
