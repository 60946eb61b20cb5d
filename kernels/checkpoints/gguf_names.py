"""Names of tensors in a GGUF file, as transformers' checkpoints name them. No torch.

llama.cpp's own: `gguf-py/gguf/tensor_mapping.py` in its repository.

What must always hold: a tensor that no name here stands for keeps its own, so that the model's reader reports it.
"""

from __future__ import annotations

import re

FREQUENCIES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are part of the configuration."""

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_BY_ARCHITECTURE = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt-oss": _GPT_OSS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
_STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Matrices of all experts of a layer in one tensor, and their biases."""
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def rename(name: str, architecture: str) -> str:
    """Return the name that a model uses for a tensor; its own if there is none."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return _GLOBAL.get(name, name)
    layer, part, kind = found.groups()
    part = (_OF_LAYER | _BY_ARCHITECTURE.get(architecture, {})).get(part, "")
    if part.endswith("sinks"):
        return f"model.layers.{layer}.{part}"
    return f"model.layers.{layer}.{part}.{kind}" if part else name


def rename_stacked(name: str, num_experts: int) -> list[str]:
    """Return the names of the experts' matrices or biases that a tensor holds, none if it holds something else."""
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _STACKED:
        return []
    prefix = f"model.layers.{found[1]}.mlp.experts"
    return [f"{prefix}.{expert}.{_STACKED[found[2]]}.{found[3]}" for expert in range(num_experts)]


def rotated_heads(name: str) -> str | None:
    """Return the key of the number of heads whose rows llama.cpp rearranges for Llama; None if it leaves them alone."""
    found = _LAYER.fullmatch(name)
    kinds = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    return None if found is None else kinds.get(found[2])
