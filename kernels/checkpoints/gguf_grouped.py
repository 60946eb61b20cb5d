"""The entries of `config.json` that GGUF files of DeepSeek and GLM-4.5 have: experts in groups, and latents. No torch.

`gguf_specifics.py` has the readers of other architectures. What must always hold: as there.
"""

from __future__ import annotations

from typing import Any

from .gguf_file import GgufFile
from .gguf_keys import Keys, has, taken

_GROUPED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
_OWN, _SOFTMAX, _SIGMOID = 0, 1, 2
"""Values of `expert_gating_func`: the architecture's own, and others."""


def _grouped(keys: Keys) -> dict[str, Any]:
    """Return the entries of experts as DeepSeek names them."""
    return {
        **taken(keys, _GROUPED),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(keys.take("expert_weights_norm", False)),
        "n_group": keys.whole("expert_group_count", 1),
        "topk_group": keys.whole("expert_group_used_count", 1),
    }


def read_glm4_moe(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries; the last of the file's blocks may be for multi-token prediction."""
    if (function := keys.whole("expert_gating_func", _OWN)) not in (_OWN, _SIGMOID):
        raise ValueError(f"key 'glm4moe.expert_gating_func' {function} is not supported")
    num_ignored = keys.whole("nextn_predict_layers", 0)
    return {
        **_grouped(keys),
        "num_hidden_layers": config["num_hidden_layers"] - num_ignored,
        "num_nextn_predict_layers": num_ignored,
        "attention_bias": has(file, "attn_q.bias"),
        "use_qk_norm": has(file, "attn_q_norm.weight"),
    }


def read_deepseek2(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries. Sigmoids make it a V3. Keys and values are those of heads, or in newer files of latents."""
    rotated = keys.whole("rope.dimension_count")
    key, value = keys.whole("attention.key_length"), keys.whole("attention.value_length")
    function = keys.whole("expert_gating_func", _OWN)
    if function not in (_OWN, _SOFTMAX, _SIGMOID):
        raise ValueError(f"key 'deepseek2.expert_gating_func' {function} is not supported")
    experts, is_v3 = _grouped(keys), function == _SIGMOID
    grouped = {"topk_method": "group_limited_greedy" if experts["n_group"] > 1 else "greedy"}
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier and config["rope_parameters"]["rope_type"] == "yarn":
        scale = round(10 * multiplier, 6)
        config["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}
    return {
        **experts,
        **({"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 0} if is_v3 else grouped),
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": None,
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "q_lora_rank": keys.take("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.whole("attention.key_length_mla", key) - rotated,
        "v_head_dim": keys.whole("attention.value_length_mla", value),
    }
