"""Names of tensors in a GGUF file, as transformers' checkpoints name them. No torch.

llama.cpp's own: `gguf-py/gguf/tensor_mapping.py` in its repository.

What must always hold: a tensor that no name here stands for keeps its own, so that the model's reader reports it.
"""

from __future__ import annotations

import re

MOST_EXPERTS = 65_536
"""In one tensor: an object is made for each, however few numbers it has."""

FREQUENCIES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are part of the configuration."""

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_INPUT = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    **_GEMMA,
    **_OF_INPUT,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **_GEMMA,
    **_OF_INPUT,
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_LLAMA4 = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
_QWEN2_MOE = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_BY_ARCHITECTURE = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gpt-oss": _GPT_OSS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "chatglm": {"ffn_up": "mlp.gate_up_proj"},
    "deepseek2": _DEEPSEEK,
    "exaone4": _AFTER,
    "glm4": _GLM4,
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    "granitemoe": {"ffn_gate_inp": "block_sparse_moe.router.layer"},
    "llama4": _LLAMA4,
    "olmo2": _AFTER,
    "phimoe": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen2moe": _QWEN2_MOE,
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
_WHOLE = {
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b.weight": "mlp.gate.e_score_correction_bias",
}
"""Tensors that are no weights or biases of a module."""
_EXPERTS_OF = {
    "granitemoe": "block_sparse_moe.",
    "gemma4": "",
    "llama4": "feed_forward.",
    "phimoe": "block_sparse_moe.",
}
"""What the experts are in, if it is not `mlp`."""
_MATRICES_OF = {"phimoe": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}
"""How their matrices are called, if not as below."""
_STACKED = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
"""Matrices of all experts of a layer in one tensor, and their biases."""
_OF_COPIES = {"altup_proj.weight": "altup_projections", "altup_unembd_proj.weight": "altup_unembed_projections"}
"""Matrices of all copies of a hidden state but the first, in one tensor."""
_LAYER = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias|scale)")
_LATENT = re.compile(r"blk\.(\d+)\.attn_([kv])_b\.weight")
_PREDICTING = re.compile(r"blk\.(\d+)\.(nextn\..+)")
"""Of layers for multi-token prediction, which no model reads."""


def rename(name: str, architecture: str) -> str:
    """Return the name that a model uses for a tensor; its own if there is none."""
    found = _LAYER.fullmatch(name)
    if found is None:
        predicting = _PREDICTING.fullmatch(name)
        return _GLOBAL.get(name, name) if predicting is None else "model.layers.{}.{}".format(*predicting.groups())
    layer, part, kind = found.groups()
    if (whole := _WHOLE.get(f"{part}.{kind}")) is not None:
        return f"model.layers.{layer}.{whole}"
    part = (_OF_LAYER | _BY_ARCHITECTURE.get(architecture, {})).get(part, "")
    return f"model.layers.{layer}.{part}.{kind}" if part else name


def rename_stacked(name: str, count: int, architecture: str) -> list[str]:
    """Return the names of the matrices or biases that a tensor holds of `count` experts or copies, one after the other.

    None of them if it holds something else. Raises ValueError for more than any model has.
    """
    found = _LAYER.fullmatch(name)
    is_stacked = found is not None and found[2] in _STACKED
    if (is_stacked or name in _OF_COPIES) and count > MOST_EXPERTS:
        raise ValueError(f"tensor {name} is of {count} experts or copies, at most {MOST_EXPERTS} are read")
    if name in _OF_COPIES:
        return [f"model.{_OF_COPIES[name]}.{copy}.weight" for copy in range(count)]
    if found is None or not is_stacked:
        return []
    prefix = f"model.layers.{found[1]}.{_EXPERTS_OF.get(architecture, 'mlp.')}experts"
    called = _MATRICES_OF.get(architecture, {})
    parts = [called.get(part, part) for part in _STACKED[found[2]]]
    return [f"{prefix}.{expert}.{part}.{found[3]}" for expert in range(count) for part in parts]


def latent_part(name: str) -> tuple[str, str] | None:
    """Return the name of the matrix that makes keys and values of latents, and which of them a tensor makes: k or v.

    None: it is another tensor.
    """
    found = _LATENT.fullmatch(name)
    return None if found is None else (f"model.layers.{found[1]}.self_attn.kv_b_proj.weight", found[2])


def fused_heads(name: str, architecture: str) -> list[str]:
    """Return the names of queries, keys and values, which follow each other in a tensor.

    None of them if it holds something else, or if models read it whole.
    """
    found = _LAYER.fullmatch(name)
    if architecture != "chatglm" or found is None or found[2] != "attn_qkv":
        return []
    return [f"model.layers.{found[1]}.self_attn.{part}_proj.{found[3]}" for part in "qkv"]


def rotated_heads(name: str, architecture: str) -> str | None:
    """Return the key of the number of heads whose rows llama.cpp rearranges; None if it leaves them alone."""
    if architecture not in ("llama", "mistral3", "granite", "granitemoe", "smollm3"):
        return None
    found = _LAYER.fullmatch(name)
    kinds = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    return None if found is None else kinds.get(found[2])
