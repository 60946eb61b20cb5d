"""Every entry of a config.json is supported, neutral or refused by name, for every family.

No weights are loaded: a family's `parse` decides before any tensor is read. What is accepted: test_accepted_entries.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from quipu.kernels.models.families import FAMILIES, find_family
from tests.kernels.family_configs import CONFIGS
from tests.kernels.models.parsed_configs import LONG, YARN, config_of, parse


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
    ("granite", {"residual_multiplier": 1e-320}, "residual_multiplier is 1e-320, must be a"),
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
    ("llama", {"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta is 1.0, must be above 1 for rope_type 'yarn'"),
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
