"""The configurations of Gemma 2, and of the text parts of Gemma 3 and 4 (Gemma Team, arXiv:2408.00118, 2503.19786).

Norms before and after attention and MLP, with weights 1 + w; scaled embeddings; GELU; soft caps on logits. Gemma 2 caps
attention scores, too, and has a window in every second layer. Gemma 3 norms query and key heads, and has a window and
another rotary embedding in five layers of six. `decoder_model.py` computes them, and `gemma4_model.py` Gemma 4, whose
norms have weights w. Gemma 3n is in `gemma3n.py`.
"""

from __future__ import annotations

from typing import Any

from .config import (
    DecoderConfig,
    NormNames,
    every_nth_full,
    positive,
    positive_number,
    read_sizes,
    read_windows,
    whole,
)
from .config_parts import Gemma4Config, HeadShape, InputConfig, MoeConfig
from .mixtures import check_values
from .rope_config import parse_rope, parse_rope_of_type, parse_ropes_of_types, rope_entries

_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def parse_gemma2(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. Soft caps and windows default to those of Gemma 2 9B."""
    sizes = read_sizes(data, default_head_dim=256, tied=True)
    alternating = ["full_attention" if index % 2 else "sliding_attention" for index in range(sizes["num_layers"])]
    return DecoderConfig(
        **sizes,
        **_common(sizes),
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=read_windows(data, alternating, 4096),
        attention_scale=_read_scale(data),
        attention_soft_cap=positive_number(data, "attn_logit_softcapping", default=50.0),
        logits_soft_cap=positive_number(data, "final_logit_softcapping", default=30.0),
    )


def parse_gemma3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default every sixth layer has no window."""
    sizes = read_sizes(data, default_head_dim=256, tied=True)
    every = positive(data, "sliding_window_pattern", default=6)
    thetas = (1_000_000.0, data.get("rope_local_base_freq") or 10_000.0)
    rope, local_rope = parse_ropes_of_types(data, head_dim=sizes["head_dim"], thetas=thetas)
    return DecoderConfig(
        **sizes,
        **_common(sizes),
        rope=rope,
        local_rope=local_rope,
        windows=read_windows(data, every_nth_full(sizes["num_layers"], every), 4096),
        norms_heads=True,
        attention_scale=_read_scale(data),
        logits_soft_cap=positive_number(data, "final_logit_softcapping", default=None),
    )


def _common(sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "norms": _NORMS,
        "adds_one_to_norms": True,
        "activation": "gelu",
        "embed_scale": sizes["hidden_size"] ** 0.5,
    }


def _read_scale(data: dict[str, Any]) -> float:
    return float(positive(data, "query_pre_attn_scalar", default=256) ** -0.5)


def parse_gemma4(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default every sixth layer has no window; the last one never has.

    That text sees images in both directions (`use_bidirectional_attention` "vision") changes nothing without images.
    """
    check_values(data, use_bidirectional_attention="vision")
    sizes = read_sizes(data, default_head_dim=256, tied=True)
    num_layers = sizes["num_layers"]
    types = list(data.get("layer_types") or every_nth_full(num_layers, 6))
    windows = read_windows({**data, "layer_types": [*types[:-1], "full_attention"]}, [], 512)
    mine = HeadShape(sizes["num_kv_heads"], sizes["head_dim"])
    full = _read_full_heads(data, mine, windows)
    if sizes["num_heads"] % full.num_kv_heads or full.head_dim % 2:
        raise ValueError(
            f"config.json: layers without a window have {full.num_kv_heads} key/value heads of {full.head_dim}, must "
            f"divide {sizes['num_heads']} heads, and be of an even size"
        )
    cached, width = read_cached(data, windows, default=0), sizes["intermediate_size"]
    is_wide = bool(data.get("use_double_wide_mlp"))
    input_width = whole({"hidden_size_per_layer_input": 256, **data}, "hidden_size_per_layer_input")
    entries = rope_entries(data)
    ropes = [
        parse_rope_of_type(data, head_dim=head_dim, entries=entries.get(kind) or default, proportional=True)
        for kind, head_dim, default in (
            ("full_attention", full.head_dim, _PROPORTIONAL),
            ("sliding_attention", mine.head_dim, {"rope_theta": 10_000.0}),
        )
    ]
    return DecoderConfig(
        **sizes,
        rope=ropes[0],
        local_rope=ropes[1],
        windows=windows,
        activation="gelu",
        embed_scale=sizes["hidden_size"] ** 0.5,
        attention_scale=1.0,
        logits_soft_cap=positive_number(data, "final_logit_softcapping", default=None),
        moe=_parse_gemma4_moe(data) if data.get("enable_moe_block") else None,
        cached=cached,
        gemma4=Gemma4Config(
            heads=tuple(full if window is None else mine for window in windows),
            values_are_keys=bool(data.get("attention_k_eq_v")),
            mlp_widths=tuple(2 * width if is_wide and own != index else width for index, own in enumerate(cached)),
            inputs=InputConfig(input_width, _read_input_vocab_size(data, sizes["vocab_size"])) if input_width else None,
        ),
    )


_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
"""Of layers without a window, unless the configuration says otherwise."""


def _read_full_heads(data: dict[str, Any], mine: HeadShape, windows: tuple[int | None, ...]) -> HeadShape:
    """Read the heads of layers without a window: as published, or as transformers writes them, for each layer."""
    if (overrides := data.get("per_layer_config")) is None:
        shared = positive(data, "num_global_key_value_heads", default=mine.num_kv_heads)
        num_kv_heads = shared if data.get("attention_k_eq_v") else mine.num_kv_heads
        return HeadShape(num_kv_heads, positive(data, "global_head_dim", default=512))
    full = {str(index) for index, window in enumerate(windows) if window is None}
    kinds = [one for one in overrides.values() if isinstance(one, dict)]
    first = kinds[0] if kinds else {}
    is_like_full = {str(index) for index in overrides} == full and all(one == first for one in overrides.values())
    if not is_like_full or first.keys() - {"head_dim", "num_key_value_heads"}:
        raise ValueError(
            "config.json: per_layer_config is not supported but for head_dim and num_key_value_heads, the same of all "
            "layers without a window"
        )
    return HeadShape(
        positive(first, "num_key_value_heads", default=mine.num_kv_heads),
        positive(first, "head_dim", default=mine.head_dim),
    )


def read_cached(data: dict[str, Any], windows: tuple[int | None, ...], *, default: int) -> tuple[int, ...]:
    """Return to whose keys each layer attends: the last layers to those of the last before them of their kind."""
    count = whole({"num_kv_shared_layers": default, **data}, "num_kv_shared_layers")
    own = len(windows) - count
    kinds = [window is None for window in windows]
    if own < 1 or not set(kinds[own:]) <= set(kinds[:own]):
        raise ValueError(f"config.json: num_kv_shared_layers is {count}, before which each kind of layer must be")
    last = {kind: own - 1 - kinds[:own][::-1].index(kind) for kind in set(kinds[:own])}
    return (*range(own), *(last[kind] for kind in kinds[own:]))


def _read_input_vocab_size(data: dict[str, Any], vocab_size: int) -> int:
    size = positive(data, "vocab_size_per_layer_input", default=262_144)
    if size < vocab_size:
        raise ValueError(f"config.json: vocab_size_per_layer_input is {size}, must be at least vocab_size {vocab_size}")
    return size


def _parse_gemma4_moe(data: dict[str, Any]) -> MoeConfig:
    num_experts, num_chosen = positive(data, "num_experts"), positive(data, "top_k_experts")
    if num_chosen > num_experts:
        raise ValueError(f"config.json: top_k_experts is {num_chosen}, must not exceed num_experts {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=positive(data, "moe_intermediate_size"),
        normalise=True,
        dense_layers=frozenset(),
    )
