"""The configurations of GLM-4 (GLM Team, arXiv:2406.12793), of GLM-4-0414, which also norms what layers add, and of
GLM-4.5 (arXiv:2508.06471), a mixture of experts.

Half of each head is rotated, but for GLM-4.5 in pairs of neighbours. `decoder_model.py` computes them.
"""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, NormNames, flag, read_sizes, same_window
from .config_parts import MlpNames
from .mixtures import parse_sigmoid_moe, read_num_ignored
from .rope_config import parse_rope

_BEFORE_AND_AFTER = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def parse_glm(data: dict[str, Any]) -> DecoderConfig:
    """Parse the `config.json` of `GlmForCausalLM`."""
    return _parse(data, NormNames())


def parse_glm4(data: dict[str, Any]) -> DecoderConfig:
    """Parse the `config.json` of `Glm4ForCausalLM`."""
    return _parse(data, _BEFORE_AND_AFTER)


def parse_glm4_moe(data: dict[str, Any]) -> DecoderConfig:
    """Parse the `config.json` of `Glm4MoeForCausalLM`: experts as in DeepSeek-V3, and heads rotated as in Llama.

    Layers for multi-token prediction are not read, as in transformers.
    """
    moe = parse_sigmoid_moe(
        data,
        normalise=flag(data, "norm_topk_prob", default=True),
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
        moe_intermediate_size=1408,
    )
    sizes = read_sizes(data, rms_norm_eps=1e-5) | {"o_bias": False}
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"], partial=True, default_share=0.5),
        windows=same_window(data, None),
        norms_heads=flag(data, "use_qk_norm", default=False),
        moe=moe,
        num_ignored_layers=read_num_ignored(data),
    )


def _parse(data: dict[str, Any], norms: NormNames) -> DecoderConfig:
    sizes = read_sizes(data, default_head_dim=128, rms_norm_eps=1.5625e-7)
    sizes |= {"qkv_bias": flag(data, "attention_bias", default=True), "o_bias": False}
    rope = parse_rope(data, head_dim=sizes["head_dim"], partial=True, default_share=0.5, is_interleaved=True)
    fused = MlpNames(gate_up="gate_up_proj")
    return DecoderConfig(**sizes, rope=rope, windows=same_window(data, None), norms=norms, mlp_names=fused)
