"""The configuration of gpt-oss (OpenAI, arXiv:2508.10925): a mixture of experts in each layer, windows in every second
layer, a sink for each query head, and biases of all projections, of the router and of the experts.
"""

from __future__ import annotations

from typing import Any

from ..ops import SwigluClamp
from .config import DecoderConfig, flag, positive, positive_number, read_sizes, read_windows
from .config_parts import MoeConfig
from .rope_config import parse_rope, rope_entries

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of a config without entries for the rotary embedding."""


def parse_gpt_oss(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default layers 0, 2, 4, ... have a window. Raises ValueError.

    `experts_per_token` and `initial_context_length` are OpenAI's own names of entries that are there, too.
    """
    sizes = read_sizes(data, default_head_dim=64, rms_norm_eps=1e-5)
    sizes["qkv_bias"] = sizes["o_bias"] = flag(data, "attention_bias", default=True)
    num_layers = sizes["num_layers"]
    entries = rope_entries(data) or dict(_YARN)
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)]
    moe = _parse_moe(data, sizes["intermediate_size"])
    _check_same(data, "experts_per_token", "num_experts_per_tok", moe.num_chosen)
    original = entries.get("original_max_position_embeddings")
    _check_same(data, "initial_context_length", "original_max_position_embeddings", original)
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"], entries=entries, default_theta=150_000.0),
        windows=read_windows(data, kinds, 128),
        has_sinks=True,
        moe=moe,
    )


def _parse_moe(data: dict[str, Any], intermediate_size: int) -> MoeConfig:
    """Parse the mixture of experts, whose softmax is over the chosen ones. Raises ValueError."""
    num_experts = positive(data, "num_local_experts" if "num_local_experts" in data else "num_experts")
    num_chosen = positive(data, "num_experts_per_tok", default=4)
    if num_chosen > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {num_chosen}, must not exceed the number of experts, {num_experts}"
        )
    alpha = positive_number(data, "swiglu_alpha", default=1.702)
    limit = positive_number(data, "swiglu_limit", default=7.0)
    if alpha is None or limit is None:
        raise ValueError("config.json: swiglu_alpha and swiglu_limit must be positive numbers, not null")
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=intermediate_size,
        normalise=True,
        dense_layers=frozenset(),
        has_biases=True,
        router_name="router",
        clamp=SwigluClamp(alpha, limit),
    )


def _check_same(data: dict[str, Any], name: str, other: str, value: object) -> None:
    if data.get(name) not in (None, value):
        raise ValueError(f"config.json: {name} is {data[name]}, but {other} {value}")
