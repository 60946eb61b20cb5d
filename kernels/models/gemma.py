"""The configurations of Gemma 2 and of the text part of Gemma 3 (Gemma Team, arXiv:2408.00118 and 2503.19786).

Norms before and after attention and MLP, with weights 1 + w; scaled embeddings; GELU; soft caps on logits. Gemma 2 caps
attention scores, too, and has a window in every second layer. Gemma 3 norms query and key heads, and has a window and
another rotary embedding in five layers of six. `decoder_model.py` computes them.
"""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, NormNames, every_nth_full, positive, positive_number, read_sizes, read_windows
from .rope_config import parse_rope, parse_ropes_of_types

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
