"""What differs among the architectures of GGUF files: entries of `config.json` that only some of them have. No torch.

`gguf_config.py` reads what they have in common. An architecture is a line in `ARCHITECTURES`, and here, if it has more,
a reader. What the files do not say is what llama.cpp computes (`src/models/` in its repository).

What must always hold: a key that changes what is computed is part of the result or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .gguf_file import GgufFile, shown
from .gguf_gemma3n import read_gemma3n
from .gguf_grouped import read_deepseek2, read_glm4_moe
from .gguf_keys import Keys, has, taken
from .gguf_mistral3 import read_mistral3

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "chatglm": "GlmForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
LAYER_NORM_EPS = {"cohere2": "layer_norm_eps", "stablelm": "layer_norm_eps", "starcoder2": "norm_epsilon"}
"""Architectures whose norms subtract the mean, and the entry that has their epsilon."""
PARTLY_ROTATED = ("phi3", "chatglm", "glm4", "glm4moe", "stablelm")
"""Architectures of whose heads a part may be rotated."""
_OTHERS_OF = {
    "llama": ("MistralForCausalLM",),
    "mistral3": ("Ministral3ForCausalLM",),
    "olmo2": ("Olmo3ForCausalLM",),
    "granite": ("GraniteMoeHybridForCausalLM",),
    "deepseek2": ("DeepseekV3ForCausalLM",),
}
"""Families whose files have the name of another."""
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are divided by the root of hidden size over heads, as llama.cpp knows them."""
_CHOICE = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERTS = {**_CHOICE, "expert_feed_forward_length": "moe_intermediate_size"}
_DENSE = re.compile(r"blk\.(\d{1,6})\.ffn_gate\.weight")
_MIXED = re.compile(r"blk\.(\d{1,6})\.ffn_gate_inp\.weight")
_OF_LLAMA4 = {
    "attention.sliding_window": (None, 8192),
    "attention.sliding_window_pattern": (None, 4),
    "expert_gating_func": (None, 0, 2),
}
"""Keys of Llama 4 by the values that llama.cpp computes with, which has constants for chunks and temperatures."""
_MAVERICK = 128
"""Experts of the only Llama 4 that does not norm queries and keys, as llama.cpp knows it."""


def architectures_of(family: str) -> list[str]:
    """Return the names that a family of `models/` has in GGUF files."""
    return [name for name, its in ARCHITECTURES.items() if family in (its, *_OTHERS_OF.get(name, ()))]


def read_specifics(file: GgufFile, keys: Keys, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the entries that only this architecture has. Raises ValueError naming a key that is not supported."""
    reader = _READERS.get(architecture)
    return {} if reader is None else reader(file, keys, config)


def _window(keys: Keys) -> Any:
    return keys.take("attention.sliding_window") or None


def _layer_types(keys: Keys) -> dict[str, Any]:
    """Return the types of layers if the file lists them, else in which period one has no window, if it says so."""
    pattern = keys.take("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
    return {} if pattern is None else {"sliding_window_pattern": pattern}


def _llama(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = _window(keys)
    if window is not None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {"attention_bias": has(file, "attn_q.bias")}


def _llama4(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries. Which layers are mixtures is seen by their tensors, as `interleave_moe_layer_step` says."""
    for name, computed in _OF_LLAMA4.items():
        if (value := keys.take(name)) not in computed:
            raise ValueError(f"key 'llama4.{name}' {shown(value)} is not supported")
    keys.take("interleave_moe_layer_step")
    num_experts = keys.whole("expert_count")
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "moe_layers": sorted(int(found[1]) for name in file.tensors if (found := _MIXED.fullmatch(name))),
        "use_qk_norm": num_experts != _MAVERICK,
    }


def _qwen3(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True} if has(file, "attn_q.bias") else {}


def _qwen3_moe(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    dense = [int(found[1]) for name in file.tensors if (found := _DENSE.fullmatch(name))]
    return {**taken(keys, _EXPERTS), "norm_topk_prob": True, "mlp_only_layers": sorted(dense)}


def _qwen2_moe(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    shared = keys.whole("expert_shared_feed_forward_length", config["intermediate_size"])
    bias = has(file, "attn_q.bias")
    return {**taken(keys, _EXPERTS), "shared_expert_intermediate_size": shared, "qkv_bias": bias}


def _phi3(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": _window(keys)}


def _phimoe(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries. No file has the range of SparseMixer, which is then that of all published models."""
    rope = config["rope_parameters"]
    factor = rope.pop("attention_factor", None)
    return {
        "sliding_window": _window(keys),
        "num_local_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "attention_bias": has(file, "attn_q.bias"),
        "lm_head_bias": "output.bias" in file.tensors,
        "rope_parameters": rope if factor is None else {**rope, "short_mscale": factor, "long_mscale": factor},
    }


def _chatglm(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": has(file, "attn_q.bias") or has(file, "attn_qkv.bias")}


def _gpt_oss(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "sliding_window": _window(keys),
    }


def _gemma2(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(keys, config, "gemma2") | {"attn_logit_softcapping": keys.take("attn_logit_softcapping")}


def _gemma3(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(keys, config, "gemma3")


def _gemma(keys: Keys, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    is_largest = config["num_hidden_layers"] == _LARGEST_GEMMA[architecture]
    types = _layer_types(keys)
    if architecture == "gemma2":
        types.pop("sliding_window_pattern", None)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _window(keys),
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
        ),
        "final_logit_softcapping": keys.take("final_logit_softcapping"),
        **types,
    }


def _cohere2(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": has(file, "attn_q.bias"),
        "sliding_window": _window(keys),
        "logit_scale": keys.number("logit_scale"),
        **_layer_types(keys),
    }


def _stablelm(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    keys.take("use_parallel_residual")  # llama.cpp, too, goes by the norm that is not there
    if has(file, "attn_q_norm.weight"):
        raise ValueError(
            "norms of query and key heads (tensor blk.0.attn_q_norm.weight) are not supported for stablelm"
        )
    return {"use_qkv_bias": has(file, "attn_q.bias"), "use_parallel_residual": not has(file, "ffn_norm.weight")}


def _starcoder2(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": has(file, "attn_q.bias"), "sliding_window": _window(keys)}


def _exaone4(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": _window(keys), **_layer_types(keys)}


def _seed_oss(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": has(file, "attn_q.bias"), "attention_out_bias": has(file, "attn_output.bias")}


def _olmo2(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a file with windows an OLMo 3, whose layers with a window are rotated without scaling."""
    window = _window(keys)
    if window is None:
        return {}
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        **_layer_types(keys),
    }


def _olmoe(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {**taken(keys, _CHOICE), "norm_topk_prob": False}


def _granite(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.take("rope.scaling.finetuned", True) is not True:  # how Granite's files say that heads are not rotated
        raise ValueError("a Granite without rotary embedding (key 'rope.scaling.finetuned' false) is not supported")
    own = config["head_dim"] ** -0.5
    return {
        "attention_bias": has(file, "attn_q.bias"),
        "attention_multiplier": keys.number("attention.scale", 0.0) or own,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale"),
    }


def _granite_moe(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {**_granite(file, keys, config), **taken(keys, _CHOICE)}


def _glm4(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": has(file, "attn_q.bias")}


_READERS: dict[str, Callable[[GgufFile, Keys, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral3": read_mistral3,
    "llama4": _llama4,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": read_gemma3n,
    "phi3": _phi3,
    "phimoe": _phimoe,
    "gpt-oss": _gpt_oss,
    "chatglm": _chatglm,
    "cohere2": _cohere2,
    "deepseek2": read_deepseek2,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "glm4moe": read_glm4_moe,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "seed_oss": _seed_oss,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
