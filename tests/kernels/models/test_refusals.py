"""Every entry of a config.json is supported, neutral or refused by name, for every family.

No weights are loaded: a family's `parse` decides before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from statistics import NormalDist
from typing import Any

import attrs
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quipu.kernels.models.config import DecoderConfig, check_length
from quipu.kernels.models.config_parts import Gemma3nConfig, HeadShape, InputConfig, Temperature
from quipu.kernels.models.families import FAMILIES, find_family
from quipu.kernels.models.rope_config import ProportionalScaling, Rope, YarnScaling
from quipu.kernels.ops import SwigluClamp
from tests.kernels.family_configs import CONFIGS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "partial_rotary_factor": 0.5}


@cache
def _written(name: str) -> dict[str, Any]:
    written: dict[str, Any] = CONFIGS[name]().to_dict()
    return written


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json that transformers writes for a checkpoint, with entries changed; `...` removes one."""
    config = {**deepcopy(_written(name)), **changes}
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    return {key: value for key, value in config.items() if value is not ...}


def parse(name: str, **changes: Any) -> DecoderConfig:
    data = config_of(name, **changes)
    return find_family(data).parse(data)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_entry_is_accounted_for(name: str) -> None:
    """Read, refuse or know as neutral every entry of transformers' configuration class for the architecture."""
    parse(name)


def test_every_family_has_a_checkpoint() -> None:
    """Have a test checkpoint for every family."""
    tested = {config_of(name)["architectures"][0] for name in CONFIGS}
    assert tested == FAMILIES.keys()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # numbers and matrices
    ("llama", {"mlp_bias": True}, "mlp_bias True"),
    ("qwen2", {"attention_bias": True}, "attention_bias True"),
    ("mistral", {"attention_bias": True}, "attention_bias True"),
    ("qwen2", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
    ("gemma3", {"hidden_act": "silu"}, "hidden_act 'silu'"),
    ("llama", {"compression_config": {"format": "x"}}, "compression_config {...} is"),
    ("llama", {"quantization": {"group_size": 64, "bits": 4}}, "quantization {...} is"),
    ("llama", {"is_llama_config": False}, "is_llama_config False"),
    ("llama", {"activation": "relu"}, "activation 'relu' is not supported, only 'silu'"),
    ("gemma2", {"activation": "swiglu"}, "activation 'swiglu' is not supported, only 'gelu_pytorch_tanh'"),
    ("llama", {"head_dim": 15}, "head_dim is 15, must be even"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is null"),
    ("gemma2", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    ("qwen2", {"max_window_layers": None}, "max_window_layers is None"),
    ("mistral", {"num_key_value_heads": ...}, "num_key_value_heads is None"),
    ("gemma2", {"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
    ("granite", {"mlp_bias": True}, "mlp_bias True"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0"),
    ("granite", {"logits_scaling": "8"}, "logits_scaling is '8'"),
    ("seed-oss", {"mlp_bias": True}, "mlp_bias True"),
    ("llama", {"attention_out_bias": True}, "attention_out_bias True"),
    ("smollm3", {"num_key_value_heads": ...}, "num_key_value_heads is None"),
    # windows
    ("llama", {"sliding_window": 128}, "sliding_window 128"),
    ("olmo2", {"sliding_window": 128}, "sliding_window 128"),
    ("olmo3", {"sliding_window": None}, "sliding_window is null"),
    ("exaone4", {"layer_types": ..., "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
    ("exaone4", {"sliding_window": None}, "layer_types sliding_attention"),
    ("ministral", {"layer_types": ["chunked_attention"] * 2}, "layer_types chunked_attention"),
    ("smollm3", {"use_sliding_window": False}, "layer_types sliding_attention"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types full_attention"),
    ("phi3", {"layer_types": ["full_attention"] * 2}, "layer_types full_attention"),
    ("qwen3-moe", {"layer_types": ["sliding_attention"] * 2}, "layer_types sliding_attention"),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention"),
    ("qwen2", {"use_sliding_window": False}, "layer_types sliding_attention"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    ("gemma2", {"sliding_window": None}, "sliding_window is null"),
    ("gemma3", {"sliding_window": -1}, "sliding_window is -1"),
    # scores
    ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0"),
    ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0"),
    ("qwen3-tied", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
    ("llama", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 64"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("llama", {"attention_multiplier": 0.5}, "attention_multiplier 0.5"),
    ("llama", {"is_causal": False}, "is_causal False"),
    ("llama", {"qk_layernorm": True}, "qk_layernorm True"),
    ("llama", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
    # rotary embedding
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "proportional"}}, "rope_type 'proportional'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' requires original_max_position"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "'linear' requires factor"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    ("llama", {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor is not supported"),
    ("llama", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section is not supported"),
    ("mistral", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta is not supported"),
    ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta is None, must be a number, 0"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta is -1"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 1}}, "original_max_position_embeddings is None"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ among layers"),
    ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("phi4", {"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor 0.1 rotates 3 of"),
    ("phi3", {"rope_parameters": {**LONG, "rope_type": "longrope", "short_factor": [1.0]}}, "a list of 4 numbers"),
    ("phi3", {"rope_parameters": {**LONG, "rope_type": "su", "long_mscale": 1.2}}, "long_mscale is not supported"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope_type 'dynamic'"),
    ("llama", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
    ("glm", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor 0.3 rotates 9 of"),
    ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope_type 'dynamic'"),
    ("llama", {"rotary_pct": 0.25}, "rotary_pct 0.25"),
    (
        "gemma3n",
        {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}},
        "truncate false is not supported",
    ),
    ("olmo3", {"rope_parameters": {**YARN, "truncate": False}}, "truncate false is not supported"),
    (
        "gemma4",
        {"rope_parameters": {"sliding_attention": {**YARN, "truncate": None}}},
        "truncate false is not supported",
    ),
    (
        "gemma4",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
        "partial_rotary_factor 0.5 is not supported",
    ),
    # other layers
    ("llama", {"num_local_experts": 8}, "num_local_experts 8"),
    ("qwen3-moe", {"num_experts_per_tok": 12}, "num_experts_per_tok is 12"),
    ("qwen3-moe", {"num_local_experts": ..., "num_experts": None}, "num_experts is None"),
    ("qwen3-moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64"),
    ("qwen2-moe", {"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size is None"),
    ("qwen2-moe", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
    ("gpt-oss", {"swiglu_limit": None}, "swiglu_alpha and swiglu_limit must be positive numbers, not null"),
    ("gpt-oss", {"swiglu_alpha": 0}, "swiglu_alpha is 0"),
    ("gpt-oss", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6"),
    ("gpt-oss", {"experts_per_token": 2}, "experts_per_token is 2, but num_experts_per_tok 4"),
    ("gpt-oss", {"initial_context_length": 64}, "initial_context_length is 64, but original_max_position_embeddings"),
    ("gpt-oss", {"sliding_window": None}, "sliding_window is null"),
    ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("gpt-oss", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen3-moe", {"swiglu_limit": 7.0}, "swiglu_limit 7.0"),
    ("llama", {"residual_multiplier": 0.2}, "residual_multiplier 0.2"),
    ("llama", {"logits_scaling": 8.0}, "logits_scaling 8.0"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder True"),
    ("qwen3-tied", {"vision_config": {"depth": 2}}, "vision_config"),
    ("qwen3-tied", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    # norms that subtract the mean, and what comes with them
    ("cohere2", {"sliding_window": None}, "sliding_window is null"),
    ("cohere2", {"use_parallel_block": False}, "use_parallel_block False"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm True"),
    ("cohere2", {"head_dim": 32}, "head_dim 32"),
    ("cohere2", {"logit_scale": 0}, "logit_scale is 0"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm True"),
    ("stablelm", {"layer_norm_eps": None}, "layer_norm_eps is null"),
    ("starcoder2", {"norm_type": "rms_norm"}, "norm_type 'rms_norm'"),
    ("starcoder2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok 3"),
    ("phimoe", {"router_jitter_noise": None}, "router_jitter_noise is null"),
    ("phimoe", {"num_local_experts": 1}, "num_local_experts is 1, must be at least 2"),
    ("phimoe", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    ("phimoe", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' requires short_mscale"),
    ("llama", {"lm_head_bias": True}, "lm_head_bias True"),
    # multipliers, and an MLP that all tokens have
    ("granite-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7"),
    ("granite-moe", {"shared_intermediate_size": 32}, "shared_intermediate_size 32"),
    ("granite-4", {"layer_types": ["mamba", "attention"]}, "layer_types mamba"),
    ("granite-4", {"layer_types": ...}, "layer_types mamba"),
    ("granite-4", {"position_embedding_type": "learned"}, "position_embedding_type 'learned'"),
    ("granite-4", {"shared_intermediate_size": ...}, "shared_intermediate_size is None"),
    ("granite-4", {"normalization_function": "layernorm"}, "normalization_function 'layernorm'"),
    ("granite", {"mamba_n_heads": 8}, "mamba_n_heads 8"),
    # heads that differ among layers, and layers without keys
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 48}}}, "per_layer_config is not supported but"),
    ("gemma4", {"per_layer_config": {1: {"hidden_size": 8}, 2: {}, 4: {}, 5: {}}}, "per_layer_config is not supported"),
    ("gemma4", {"per_layer_config": ..., "global_head_dim": 47}, "2 key/value heads of 47"),
    ("gemma4", {"per_layer_config": ..., "num_global_key_value_heads": 3}, "3 key/value heads of 512"),
    ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6"),
    ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5"),
    ("gemma4", {"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input is 300"),
    ("gemma4", {"top_k_experts": 6}, "top_k_experts is 6"),
    ("gemma4", {"num_experts": None}, "num_experts is None"),
    ("gemma4", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
    ("gemma4", {"layer_types": ["chunked_attention"] * 6}, "layer_types chunked_attention"),
    # copies of the hidden state, and what differs among layers beside them
    ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs is 1, must be at least 2"),
    ("gemma3n", {"altup_active_idx": 3}, "altup_active_idx is 3, must be below altup_num_inputs 3"),
    ("gemma3n", {"altup_active_idx": -1}, "altup_active_idx is -1"),
    ("gemma3n", {"laurel_rank": 0}, "laurel_rank is 0"),
    ("gemma3n", {"intermediate_size": [96] * 5}, "intermediate_size has 5 entries for 6 layers"),
    ("gemma3n", {"intermediate_size": [96] * 5 + [0]}, "intermediate_size is 0"),
    ("gemma3n", {"activation_sparsity_pattern": [0.5] * 5}, "activation_sparsity_pattern has 5 entries for 6 layers"),
    ("gemma3n", {"activation_sparsity_pattern": [0.5] * 5 + [1.0]}, "must be from 0 to below 1"),
    ("gemma3n", {"activation_sparsity_pattern": [0.5] * 5 + [-0.1]}, "must be from 0 to below 1"),
    ("gemma3n", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6"),
    ("gemma3n", {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5"),
    ("gemma3n", {"num_kv_shared_layers": ...}, "num_kv_shared_layers is 15"),
    ("gemma3n", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0"),
    ("gemma3n", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma3n", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ("gemma3n", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
    ("llama", {"intermediate_size": [96] * 2}, "intermediate_size is \\[96, 96\\], must be a positive integer"),
    ("gemma3", {"laurel_rank": 64}, "laurel_rank 64"),
    ("gemma4", {"altup_num_inputs": 4}, "altup_num_inputs 4"),
    ("gemma4", {"activation_sparsity_pattern": [0.95] * 6}, "activation_sparsity_pattern"),
    # chunks, and mixtures between dense layers
    ("llama4", {"layer_types": ["sliding_attention"] * 3}, "layer_types sliding_attention"),
    ("llama4", {"layer_types": ["linear_attention"] * 3}, "layer_types linear_attention"),
    ("llama4", {"layer_types": ["chunked_attention"]}, "layer_types has 1 entries for 3 layers"),
    ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is null"),
    ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    ("llama4", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 3 layers"),
    ("llama4", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ("llama4", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6"),
    ("llama4", {"num_local_experts": ...}, "num_local_experts is None"),
    ("llama4", {"intermediate_size_mlp": ...}, "intermediate_size_mlp is None"),
    ("llama4", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
    ("llama4", {"floor_scale": 0}, "floor_scale is 0"),
    ("llama4", {"attn_scale": None}, "floor_scale and attn_scale must be positive numbers, not null"),
    (
        "llama4",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        "an attention_factor of 1.13.* is not supported with use_qk_norm",
    ),
    ("llama", {"attn_temperature_tuning": True}, "attn_temperature_tuning True"),
    ("llama", {"attention_chunk_size": 8192}, "attention_chunk_size 8192"),
    ("qwen3-moe", {"moe_layers": [1]}, "moe_layers"),
    ("qwen3-moe", {"intermediate_size_mlp": 64}, "intermediate_size_mlp 64"),
    ("gemma3", {"num_kv_shared_layers": 1}, "num_kv_shared_layers 1"),
    ("gemma3", {"attention_k_eq_v": True}, "attention_k_eq_v True"),
    ("gemma3", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256"),
    # latents, and experts in groups
    ("llama", {"q_lora_rank": 32}, "q_lora_rank 32"),
    ("deepseek-v2-lite", {"attention_bias": True}, "attention_bias True"),
    ("deepseek-v2-lite", {"kv_lora_rank": "48"}, "kv_lora_rank is '48'"),
    ("deepseek-v2-lite", {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15"),
    ("deepseek-v2-lite", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    ("deepseek-v2-lite", {"n_shared_experts": -1}, "n_shared_experts is -1"),
    ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob True"),
    ("deepseek-v2", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek-v2", {"n_group": 3}, "n_group is 3, must divide"),
    ("deepseek-v2", {"topk_group": 5}, "topk_group is 5"),
    ("deepseek-v2", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, must not exceed the 6"),
    ("deepseek-v3", {"n_group": 9}, "n_group is 9"),
    ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
    ("deepseek-v3", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
]


@pytest.mark.parametrize(("name", "changes", "named"), REFUSED)
def test_refused(name: str, changes: dict[str, Any], named: str) -> None:
    """Refuse an entry that requires something unsupported, by name; accept the config without it."""
    parse(name)
    with pytest.raises(ValueError, match=named):
        parse(name, **changes)


@pytest.mark.parametrize(
    ("architecture", "named"),
    [("LlavaForConditionalGeneration", "LlavaForConditionalGeneration"), ("MixtralForCausalLM", "Mixtral")],
)
def test_architectures(architecture: str, named: str) -> None:
    """Name the unsupported architecture, and those that are supported."""
    with pytest.raises(ValueError, match=rf"{named}.*quipu supports .*Qwen3MoeForCausalLM"):
        find_family({"architectures": [architecture]})


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("Lfm2ForCausalLM", "short convolutions"),
        ("Lfm2MoeForCausalLM", "short convolutions"),
        ("Qwen3NextForCausalLM", "linear attention"),
        ("Qwen3_5ForConditionalGeneration", "linear attention"),
        ("FalconH1ForCausalLM", "Mamba"),
    ],
)
def test_architectures_with_states(architecture: str, kind: str) -> None:
    """Say which layers keep a state, and advise no executor, since none serves them."""
    with pytest.raises(ValueError, match=rf"{architecture}.*layers of {kind}.*--upstream") as refused:
        find_family({"architectures": [architecture]})
    assert "--executor" not in str(refused.value)


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "EagleLlamaForCausalLM", "MedusaModel", "DeepSeekMTPModel"])
def test_draft_heads(name: str) -> None:
    """Name a head that drafts for another model, and advise no other executor for it."""
    with pytest.raises(ValueError, match=rf"^{name} is a head that drafts for another model"):
        find_family({"architectures": [name]})


ACCEPTED: list[tuple[str, dict[str, Any], Callable[[DecoderConfig], bool]]] = [
    # how Qwen configs disable the window
    ("qwen3-tied", {"sliding_window": 4096, "use_sliding_window": False}, lambda c: c.windows == (None, None)),
    ("qwen3-tied", {"sliding_window": 4096, "use_sliding_window": ...}, lambda c: c.windows == (None, None)),
    ("qwen2", {"layer_types": ...}, lambda c: c.windows == (None, 50)),
    ("qwen2", {"layer_types": ..., "max_window_layers": ...}, lambda c: c.windows == (None, None)),
    ("mistral", {"sliding_window": ...}, lambda c: c.windows == (4096, 4096)),
    ("mistral", {"sliding_window": None}, lambda c: c.windows == (None, None)),
    ("gemma2", {"layer_types": ...}, lambda c: c.windows == (33, None)),
    ("gemma2", {"layer_types": ..., "sliding_window": ...}, lambda c: c.windows == (4096, None)),
    ("gemma2", {"attn_logit_softcapping": ...}, lambda c: c.attention_soft_cap == 50.0),
    ("gemma2", {"attn_logit_softcapping": None}, lambda c: c.attention_soft_cap is None),
    ("gemma2", {"query_pre_attn_scalar": ...}, lambda c: c.attention_scale == 1 / 16),
    ("gemma3", {"layer_types": ..., "num_hidden_layers": 6}, lambda c: c.windows == (20,) * 5 + (None,)),
    ("gemma3", {"layer_types": ..., "sliding_window_pattern": 2}, lambda c: c.windows == (20, None, 20)),
    (
        "gemma3",
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        lambda c: (c.rope.theta, c.rope.scaling is None, c.local_rope.theta) == (5e5, False, 1e4),
    ),
    ("gemma3", {"rope_parameters": ...}, lambda c: (c.rope.theta, c.local_rope.theta) == (1e6, 1e4)),
    ("gemma3", {"rope_parameters": ..., "rope_local_base_freq": 2e4}, lambda c: c.local_rope.theta == 2e4),
    ("phi3", {"rms_norm_eps": ...}, lambda c: c.rms_norm_eps == 1e-5),
    ("phi4", {"num_key_value_heads": ...}, lambda c: c.num_kv_heads == 2),
    ("qwen3-moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}, lambda c: _moe(c).dense_layers == {0}),
    ("qwen3-moe", {"num_local_experts": ..., "num_experts": 7}, lambda c: _moe(c).num_experts == 7),
    ("qwen3-moe", {"norm_topk_prob": ...}, lambda c: not _moe(c).normalise),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 60}, lambda c: c.windows == (60, 60)),
    ("qwen2-moe", {"layer_types": ...}, lambda c: c.windows == (50, None)),
    ("qwen2-moe", {"layer_types": ..., "max_window_layers": 0}, lambda c: c.windows == (None, None)),
    ("qwen2-moe", {"qkv_bias": ...}, lambda c: c.qkv_bias),
    ("qwen2-moe", {"qkv_bias": False}, lambda c: not c.qkv_bias),
    # the defaults of families whose layers differ
    ("olmo3", {"layer_types": ..., "num_hidden_layers": 5}, lambda c: c.windows == (40, 40, 40, None, 40)),
    (
        "olmo3",
        {"rope_parameters": ..., "rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        lambda c: (c.rope.theta, c.rope.scaling is None, c.local_rope.theta) == (1e5, False, 5e5),
    ),
    ("exaone4", {"layer_types": ..., "sliding_window_pattern": 2}, lambda c: c.windows == (50, None)),
    ("exaone4", {"layer_types": ..., "sliding_window": ...}, lambda c: c.windows == (4096, 4096)),
    ("exaone4", {"layer_types": ..., "sliding_window": None}, lambda c: (*c.windows, *c.unrotated) == (None, None)),
    ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": 2}, lambda c: c.unrotated == {1}),
    ("smollm3", {"no_rope_layers": ..., "num_hidden_layers": 9, "layer_types": ...}, lambda c: c.unrotated == {3, 7}),
    ("smollm3", {"layer_types": ..., "use_sliding_window": ...}, lambda c: c.windows == (None, None)),
    ("ministral", {"layer_types": ...}, lambda c: c.windows == (60, 60)),
    ("ministral3", {"sliding_window": 60}, lambda c: c.windows == (60, 60)),
    (
        "ministral3",
        {"rope_parameters": ...},
        lambda c: (
            c.temperature == Temperature(16384, 0.1, 0)
            and c.rope == Rope(1e6, 32, YarnScaling(16.0, 16384, 32.0, 1.0, True, 1.0))
        ),
    ),
    ("ministral3", {"sliding_window": ...}, lambda c: (c.windows, c.temperature.floor) == ((None, None), 32)),
    ("ministral", {"layer_types": ..., "sliding_window": None}, lambda c: c.windows == (None, None)),
    ("glm", {"rope_parameters": ..., "attention_bias": ...}, lambda c: (c.rope.width, c.qkv_bias) == (16, True)),
    ("seed-oss", {"attention_bias": ..., "attention_out_bias": ...}, lambda c: (c.qkv_bias, c.o_bias) == (True, False)),
    (
        "granite",
        {"embedding_multiplier": ..., "residual_multiplier": ..., "logits_scaling": ..., "attention_multiplier": ...},
        lambda c: (c.embed_scale, c.logits_divisor, c.attention_scale, c.rms_norm_eps) == (1.0, 1.0, 1.0, 0.01),
    ),
    ("gpt-oss", {"layer_types": ..., "num_hidden_layers": 3}, lambda c: c.windows == (50, None, 50)),
    ("gpt-oss", {"attention_bias": ...}, lambda c: (c.qkv_bias, c.o_bias) == (True, True)),
    ("gpt-oss", {"attention_bias": False}, lambda c: (c.qkv_bias, c.o_bias) == (False, False)),
    ("gpt-oss", {"head_dim": ..., "sliding_window": ...}, lambda c: (c.head_dim, c.windows) == (64, (128, None))),
    ("gpt-oss", {"rope_parameters": {**YARN, "truncate": None}}, lambda c: not c.rope.scaling.truncate),
    ("gpt-oss", {"rope_parameters": YARN}, lambda c: c.rope.scaling.truncate),
    ("gpt-oss", {"swiglu_alpha": ..., "swiglu_limit": ...}, lambda c: _moe(c).clamp == SwigluClamp(1.702, 7.0)),
    ("gpt-oss", {"num_local_experts": ..., "num_experts": 9}, lambda c: _moe(c).num_experts == 9),
    (
        "gpt-oss",
        {"rope_parameters": ..., "num_experts_per_tok": ...},
        lambda c: (
            (c.rope.theta, c.rope.scaling.factor, c.rope.scaling.truncate, _moe(c).num_chosen)
            == (150_000.0, 32.0, False, 4)
        ),
    ),
    ("cohere2", {"layer_types": ..., "sliding_window_pattern": 2}, lambda c: c.windows == (50, None)),
    ("cohere2", {"layer_types": ..., "sliding_window": ...}, lambda c: c.windows == (4096, 4096)),
    ("cohere2", {"logit_scale": ..., "tie_word_embeddings": ...}, lambda c: c.logits_divisor == 16.0),
    ("stablelm", {"layer_norm_eps": ..., "use_qkv_bias": ...}, lambda c: (c.rms_norm_eps, c.qkv_bias) == (1e-5, False)),
    ("starcoder2", {"use_bias": ..., "sliding_window": ...}, lambda c: (c.mlp_bias, c.windows) == (True, (None, None))),
    ("granite-4", {"layer_types": ["attention"] * 2}, lambda c: (*c.windows, *c.unrotated) == (None, None)),
    ("granite-4", {"position_embedding_type": ...}, lambda c: c.unrotated == {0, 1}),
    ("granite-4-moe", {"num_local_experts": 0}, lambda c: (c.moe, c.intermediate_size) == (None, 56)),
    ("granite-moe", {"num_local_experts": ..., "num_experts": 9}, lambda c: _moe(c).num_experts == 9),
    (
        "phimoe",
        {"rope_parameters": ..., "sliding_window": ..., "router_jitter_noise": ..., "lm_head_bias": ...},
        lambda c: (
            (c.rope.theta, c.windows, _moe(c).choice.mixer_range, c.head_bias)
            == (1_000_000.0, (None, None), 0.02, False)
        ),
    ),
    (
        "gemma3n",
        {"layer_types": ..., "num_hidden_layers": 20, "num_kv_shared_layers": ..., "intermediate_size": 96}
        | {"activation_sparsity_pattern": ..., "altup_num_inputs": ..., "altup_active_idx": ..., "laurel_rank": ...},
        lambda c: (
            c.windows == ((30,) * 4 + (None,)) * 4
            and c.cached == (0, 1, 2, 3, 4, *((3,) * 4 + (4,)) * 3)
            and _gemma3n(c).mlp_widths == (96,) * 20
            and _gemma3n(c).deviations == (NormalDist().inv_cdf(0.95),) * 10 + (None,) * 10
            and (_gemma3n(c).num_copies, _gemma3n(c).active, _gemma3n(c).laurel_rank) == (4, 0, 64)
        ),
    ),
    ("gemma3n", {"activation_sparsity_pattern": ...}, lambda c: _gemma3n(c).deviations == (None,) * 6),
    ("gemma3n", {"altup_correct_scale": ...}, lambda c: _gemma3n(c).scales_active),
    ("gemma3n", {"final_logit_softcapping": ...}, lambda c: c.logits_soft_cap == 30.0),
    ("gemma3n", {"query_pre_attn_scalar": 256, "altup_coef_clip": None}, lambda c: c.attention_scale == 1.0),
    (
        "gemma3n",
        {"hidden_size_per_layer_input": ..., "vocab_size_per_layer_input": ...},
        lambda c: _gemma3n(c).inputs == InputConfig(256, 262_144),
    ),
    ("gemma4", {"use_bidirectional_attention": "vision"}, lambda c: c.gemma4 is not None),
    (
        "gemma4",
        {"layer_types": ["sliding_attention"] * 6, "num_kv_shared_layers": 0, "per_layer_config": ...},
        lambda c: c.windows[5] is None,
    ),
    (
        "gemma4",
        {"per_layer_config": ..., "num_global_key_value_heads": 2, "attention_k_eq_v": False},
        lambda c: c.heads_of_layers == (HeadShape(2, 32), HeadShape(2, 512), HeadShape(2, 512)),
    ),
    ("gemma4", {"rope_parameters": ...}, lambda c: c.rope.scaling == ProportionalScaling(6, 1.0)),
    ("gemma4", {"enable_moe_block": False, "hidden_size_per_layer_input": 0}, lambda c: c.moe is None),
    (
        "llama4",
        dict.fromkeys(("no_rope_layers", "layer_types", "attention_chunk_size", "floor_scale", "attn_scale"), ...)
        | {"num_hidden_layers": 5},
        lambda c: (
            (c.unrotated, c.windows, c.temperature)
            == (frozenset({3}), (8192, 8192, 8192, None, 8192), Temperature(8192.0, 0.1, 1))
        ),
    ),
    ("llama4", {"no_rope_layers": [], "no_rope_layer_interval": 2}, lambda c: c.unrotated == {1}),
    ("llama4", {"moe_layers": ..., "interleave_moe_layer_step": 2}, lambda c: _moe(c).dense_layers == {0, 2}),
    ("llama4", {"moe_layers": ..., "num_experts_per_tok": ...}, lambda c: not _moe(c).dense_layers),
    ("llama4", {"moe_layers": []}, lambda c: _moe(c).dense_layers == {0, 1, 2}),
    ("llama4", {"attn_temperature_tuning": 4, "use_qk_norm": ...}, lambda c: c.llama4.norms_heads),
    ("llama4", {"rope_parameters": ...}, lambda c: (c.rope.theta, c.rope.is_interleaved) == (500_000.0, True)),
    ("llama4-plain", {"attention_chunk_size": ..., "layer_types": ...}, lambda c: c.windows == (8192, None)),
    (
        "llama4-plain",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        lambda c: c.rope.scaling.factor == 4.0,
    ),
    # training, tokens and the like
    ("llama", {"pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False}, lambda c: True),
    ("llama", {"embedding_multiplier": 1.0, "num_experts": 0, "vision_config": None}, lambda c: True),
]


def _gemma3n(config: DecoderConfig) -> Gemma3nConfig:
    assert config.gemma3n is not None
    return config.gemma3n


def _moe(config: DecoderConfig) -> Any:
    assert config.moe is not None
    return config.moe


@pytest.mark.parametrize(("name", "changes", "holds"), ACCEPTED)
def test_accepted(name: str, changes: dict[str, Any], holds: Callable[[DecoderConfig], bool]) -> None:
    """Give absent entries the defaults of transformers, and older spellings the meaning of newer ones."""
    assert holds(parse(name, **changes))


def test_yarn_attention_factor() -> None:
    """Compute the attention factor from the factor, or from both mscales, unless it is given."""

    def factor_of(**more: float) -> float:
        scaling = parse("qwen2-yarn", rope_parameters={**YARN, **more}).rope.scaling
        assert isinstance(scaling, YarnScaling)
        return scaling.attention_factor

    assert factor_of() == pytest.approx(1.138629)
    assert factor_of(mscale=0.707, mscale_all_dim=0.707) == 1.0
    assert factor_of(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(1.277259 / 1.138629)
    assert factor_of(attention_factor=0.9) == 0.9


def test_longrope_up_to_the_original_length() -> None:
    """Accept lengths up to the original one; beyond it, cached tokens would need another rotation."""
    config = parse("phi3")
    check_length(config, 1024)
    with pytest.raises(ValueError, match=r"original_max_position_embeddings 1024.*longrope"):
        check_length(config, 1025)
    with pytest.raises(ValueError, match="max_position_embeddings 2048"):
        check_length(attrs.evolve(config, rope=parse("phi4").rope), 2049)


def test_yarn_adds_positions() -> None:
    """Extend positions to `factor` times the original length; never below those of the config."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    check_length(parse("qwen2-yarn", rope_parameters=yarn), 4000)
    with pytest.raises(ValueError, match="max_position_embeddings 4000"):
        check_length(parse("qwen2-yarn", rope_parameters=yarn), 4001)
    check_length(parse("qwen2-yarn"), 2048)
