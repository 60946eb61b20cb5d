"""The configurations of GLM-4 (GLM Team, arXiv:2406.12793), and of GLM-4-0414, which also norms what layers add.

Half of each head is rotated, in pairs of neighbours; q, k and v have biases. `decoder_model.py` computes them.
"""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, NormNames, read_sizes, same_window
from .rope_config import parse_rope

_BEFORE_AND_AFTER = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def parse_glm(data: dict[str, Any]) -> DecoderConfig:
    """Parse the `config.json` of `GlmForCausalLM`."""
    return _parse(data, NormNames())


def parse_glm4(data: dict[str, Any]) -> DecoderConfig:
    """Parse the `config.json` of `Glm4ForCausalLM`."""
    return _parse(data, _BEFORE_AND_AFTER)


def _parse(data: dict[str, Any], norms: NormNames) -> DecoderConfig:
    sizes = read_sizes(data, default_head_dim=128, rms_norm_eps=1.5625e-7)
    sizes |= {"qkv_bias": bool(data.get("attention_bias", True)), "o_bias": False}
    rope = parse_rope(data, head_dim=sizes["head_dim"], partial=True, default_share=0.5, is_interleaved=True)
    return DecoderConfig(**sizes, rope=rope, windows=same_window(data, None), norms=norms, mlp_is_stored_fused=True)
