"""The configurations of DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, grouped experts.

A token's key is one vector for all heads: a latent, from which a matrix of each head would make its key and value, and
elements that are rotated. `latent.py` computes with the latent itself. Layers for multi-token prediction, which follow
the others in V3's checkpoints, are not read, as in transformers.
"""

from __future__ import annotations

from typing import Any

import attrs

from .config import DecoderConfig, positive, read_sizes, same_window
from .config_parts import ExpertChoice, LatentConfig, MoeConfig
from .mixtures import check_values, parse_grouped_moe, parse_sigmoid_moe, read_factor, read_num_ignored, with_groups
from .rope_config import YarnScaling, parse_rope, rope_entries, yarn_attention

_NORM_EPS = 1e-6
"""Of norms of latents, whatever `rms_norm_eps` is."""


def parse_deepseek_v2(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. `topk_method` `greedy` ignores the groups of experts; `norm_topk_prob` is not computed."""
    check_values(data, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
    method = data.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"config.json: topk_method {method!r} is not supported for this architecture, only 'greedy' and "
            "'group_limited_greedy'"
        )
    data = {"first_k_dense_replace": 0, "n_shared_experts": 2, "moe_intermediate_size": 1407, **data}
    choice = ExpertChoice(factor=read_factor(data))
    if method == "group_limited_greedy":
        choice = with_groups(data, choice)
    return _parse(data, parse_grouped_moe(data, choice, normalise=False), is_interleaved=True)


def parse_deepseek_v3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. Experts are chosen by sigmoids and a bias for each (`topk_method` `noaux_tc`).

    `norm_topk_prob` and `rope_interleave` are true by default, and null is false, as in transformers.
    """
    moe = parse_sigmoid_moe(
        data,
        normalise=bool(data.get("norm_topk_prob", True)),
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
        n_shared_experts=1,
        moe_intermediate_size=2048,
    )
    config = _parse(data, moe, is_interleaved=bool(data.get("rope_interleave", True)))
    return attrs.evolve(config, num_ignored_layers=read_num_ignored(data))


def _parse(data: dict[str, Any], moe: MoeConfig, *, is_interleaved: bool) -> DecoderConfig:
    rotated = positive(data, "qk_rope_head_dim", default=64)
    if rotated % 2:
        raise ValueError(f"config.json: qk_rope_head_dim is {rotated}, must be even for rotary embedding")
    latent = LatentConfig(
        width=positive(data, "kv_lora_rank", default=512),
        query_width=None if data.get("q_lora_rank", 1536) is None else positive(data, "q_lora_rank", default=1536),
        unrotated=positive(data, "qk_nope_head_dim", default=128),
        rotated=rotated,
        value=positive(data, "v_head_dim", default=128),
        eps=_NORM_EPS,
    )
    sizes = read_sizes({**data, "head_dim": latent.key}, every_head_its_kv=True)
    if sizes["num_kv_heads"] != sizes["num_heads"]:
        raise ValueError(
            f"config.json: num_key_value_heads is {sizes['num_kv_heads']}, must be num_attention_heads, "
            f"{sizes['num_heads']}, for this architecture"
        )
    rope = parse_rope(data, head_dim=rotated, is_interleaved=is_interleaved)
    scale = (latent.unrotated + rotated) ** -0.5
    if isinstance(rope.scaling, YarnScaling) and (over := rope_entries(data).get("mscale_all_dim")):
        scale *= yarn_attention(rope.scaling.factor, over) ** 2
    return DecoderConfig(
        **{**sizes, "num_kv_heads": 1},
        rope=rope,
        windows=same_window(data, None),
        attention_scale=scale,
        latent=latent,
        moe=moe,
    )
