"""Configurations of published checkpoints, as on the Hugging Face Hub, except for entries of tokens and training."""

from __future__ import annotations

from typing import Any


def sizes(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, length: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
    }


LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PHI4_MINI_SCALING = {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0 + i / 90 for i in range(48)]}

OLMO3_YARN = {
    "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
    "original_max_position_embeddings": 8192, "rope_type": "yarn",
}  # fmt: skip
GPT_OSS = {
    "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "initial_context_length": 4096, "num_experts_per_tok": 4, "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
DEEPSEEK_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
LLAMA4 = {
    "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "for_llm_compressor": False,
    "head_dim": 128, "hidden_act": "silu", "intermediate_size_mlp": 16384, "num_experts_per_tok": 1,
    "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA4_ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
THREE_IN_FOUR = ["sliding_attention"] * 3 + ["full_attention"]

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        **sizes(32000, 4096, 11008, 32, 32, 32, 4096), "hidden_act": "silu", "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        **sizes(128256, 2048, 8192, 16, 32, 8, 131072), "attention_bias": False, "mlp_bias": False, "head_dim": 64,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        **sizes(49152, 576, 1536, 30, 9, 3, 8192), "attention_bias": False, "attention_dropout": 0.0,
        "hidden_act": "silu", "initializer_range": 0.041666666666666664, "is_llama_config": True, "mlp_bias": False,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    },
    "Falcon3-7B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        **sizes(131072, 3072, 23040, 28, 12, 4, 32768), "activation": "swiglu", "attention_bias": False,
        "head_dim": 256, "hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000042, "tie_word_embeddings": False,
    },
    "Mistral-Small, trained with unsloth": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"],
        **sizes(131072, 5120, 32768, 40, 32, 8, 131072), "dtype": "bfloat16", "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "pad_token_id": 11, "rms_norm_eps": 1e-5, "sliding_window": None,
        "rope_parameters": {"rope_theta": 1000000000.0, "rope_type": "default"}, "tie_word_embeddings": False,
        "transformers_version": "5.10.2", "unsloth_fixed": True, "unsloth_version": "2025.12.5", "use_cache": False,
    },
    "Qwen2.5-7B-Instruct with yarn": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
        **sizes(152064, 3584, 18944, 28, 28, 4, 32768), "hidden_act": "silu", "max_window_layers": 28,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        **sizes(151936, 2048, 6144, 48, 32, 4, 40960), "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_act": "silu", "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"],
        **sizes(32000, 4096, 14336, 32, 32, 8, 32768), "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "Mistral-Nemo": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"],
        **sizes(131072, 5120, 14336, 40, 32, 8, 131072), "head_dim": 128, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    },
    "gemma-2-27b": {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"],
        **sizes(256000, 4608, 36864, 46, 32, 16, 8192), "attention_bias": False, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
        **sizes(262144, 1152, 6912, 26, 4, 1, 32768), "attention_bias": False, "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "Phi-3-mini-4k": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoConfig": "x.Phi3Config"},
        **sizes(32064, 3072, 8192, 32, 32, 32, 4096), "attention_bias": False, "hidden_act": "silu",
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": 2047, "tie_word_embeddings": False,
    },
    "phi-4": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"],
        **sizes(100352, 5120, 17920, 40, 40, 10, 16384), "attention_bias": False, "hidden_act": "silu",
        "original_max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 250000,
        "sliding_window": None, "tie_word_embeddings": False,
    },
    "Phi-4-mini": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"],
        **sizes(200064, 3072, 8192, 32, 24, 8, 131072), "attention_bias": False, "full_attn_mod": 1,
        "hidden_act": "silu", "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5,
        "rope_scaling": PHI4_MINI_SCALING, "rope_theta": 10000.0, "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "OLMo-2-7B": {
        "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"],
        **sizes(100352, 4096, 11008, 32, 32, 32, 4096), "attention_bias": False, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
    },
    "OLMo-3-7B": {
        "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"],
        **sizes(100278, 4096, 11008, 32, 32, 32, 65536), "attention_bias": False, "hidden_act": "silu",
        "layer_types": THREE_IN_FOUR * 8, "rms_norm_eps": 1e-6, "rope_scaling": OLMO3_YARN, "rope_theta": 500000,
        "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"],
        **sizes(50304, 2048, 1024, 16, 16, 16, 4096), "attention_bias": False, "clip_qkv": None, "hidden_act": "silu",
        "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "EXAONE-4.0-32B": {
        "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"],
        **sizes(102400, 5120, 27392, 64, 40, 8, 131072), "head_dim": 128, "hidden_act": "silu",
        "layer_types": THREE_IN_FOUR * 16, "rms_norm_eps": 1e-5, "rope_scaling": {**LLAMA3_SCALING, "factor": 16.0},
        "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    },
    "EXAONE-4.0-1.2B": {
        "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"],
        **sizes(102400, 2048, 4096, 30, 32, 8, 65536), "head_dim": 64, "hidden_act": "silu",
        "layer_types": ["full_attention"] * 30, "rms_norm_eps": 1e-5,
        "rope_scaling": {**LLAMA3_SCALING, "factor": 16.0}, "rope_theta": 1000000, "sliding_window": None,
        "sliding_window_pattern": None, "tie_word_embeddings": True,
    },
    "granite-3.1-2b": {
        "model_type": "granite", "architectures": ["GraniteForCausalLM"],
        **sizes(49155, 2048, 8192, 40, 32, 8, 131072), "attention_bias": False, "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0, "hidden_act": "silu", "logits_scaling": 8.0, "mlp_bias": False,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"],
        **sizes(128256, 2048, 11008, 36, 16, 4, 65536), "attention_bias": False, "hidden_act": "silu",
        "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
    },
    "glm-4-9b": {
        "model_type": "glm", "architectures": ["GlmForCausalLM"],
        **sizes(151552, 4096, 13696, 40, 32, 2, 131072), "attention_bias": True, "head_dim": 128,
        "hidden_act": "silu", "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "GLM-4-9B-0414": {
        "model_type": "glm4", "architectures": ["Glm4ForCausalLM"],
        **sizes(151552, 4096, 13696, 40, 32, 2, 32768), "attention_bias": True, "head_dim": 128,
        "hidden_act": "silu", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "Seed-OSS-36B": {
        "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"],
        **sizes(155136, 5120, 27648, 64, 80, 8, 524288), "attention_bias": True, "attention_out_bias": False,
        "head_dim": 128, "hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "residual_dropout": 0.1,
        "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
        **sizes(201088, 2880, 2880, 24, 64, 8, 131072), **GPT_OSS, "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
        **sizes(201088, 2880, 2880, 36, 64, 8, 131072), **GPT_OSS, "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"],
        **sizes(151936, 2048, 5632, 24, 16, 16, 8192), "decoder_sparse_step": 1, "hidden_act": "silu",
        "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60,
        "num_experts_per_tok": 4, "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "tie_word_embeddings": False, "use_sliding_window": False,
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
        **sizes(102400, 2048, 10944, 27, 16, 16, 163840), "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 512,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_experts_per_tok": 6, "pretraining_tp": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
    },
    "DeepSeek-V2": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
        **sizes(102400, 5120, 12288, 60, 128, 128, 163840), "attention_bias": False, "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 512, "moe_intermediate_size": 1536,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_experts_per_tok": 6, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6, "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 3, "topk_method": "group_limited_greedy", "v_head_dim": 128,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        **sizes(129280, 7168, 18432, 61, 128, 128, 163840), "attention_bias": False, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "kv_lora_rank": 512, "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"],
        **sizes(151552, 4096, 10944, 46, 96, 8, 131072), "attention_bias": True, "attention_dropout": 0.0,
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
        "use_qk_norm": False,
    },
    "c4ai-command-r7b-12-2024": {
        "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"],
        **sizes(256000, 4096, 14336, 32, 32, 8, 132096), "attention_bias": False, "cache_implementation": "hybrid",
        "head_dim": 128, "hidden_act": "silu", "layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": False, "use_qk_norm": False,
    },
    "stablelm-2-1_6b": {
        "model_type": "stablelm", "architectures": ["StableLmForCausalLM"],
        **sizes(100352, 2048, 5632, 24, 32, 32, 4096), "hidden_act": "silu", "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False, "use_qkv_bias": True,
    },
    "granite-3.1-3b-a800m": {
        "model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"],
        **sizes(49155, 1536, 512, 32, 24, 8, 131072), "attention_bias": False, "attention_dropout": 0.1,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu", "logits_scaling": 6.0,
        "num_experts_per_tok": 8, "num_local_experts": 40, "output_router_logits": False, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
    },
    "granite-4.0-micro": {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
        **sizes(100352, 2560, 8192, 40, 40, 8, 131072), "attention_bias": False, "attention_dropout": 0.0,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_act": "silu", "init_method": "mup",
        "layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_chunk_size": 256, "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_d_head": 40, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 128, "mamba_proj_bias": False, "normalization_function": "rmsnorm", "num_experts_per_tok": 0,
        "num_local_experts": 0, "output_router_logits": False, "position_embedding_type": "rope",
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "gemma-3n-E4B": {
        "model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"],
        **sizes(262400, 2048, 16384, 35, 8, 2, 32768), "intermediate_size": [16384] * 35,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "altup_active_idx": 0, "altup_coef_clip": 120.0,
        "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
        "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_kv_shared_layers": 15,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "vocab_size_per_layer_input": 262144,
    },
    "gemma-4-E2B": {
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"],
        **sizes(262144, 1536, 6144, 35, 8, 1, 131072), "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": False, "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_experts": None,
        "num_global_key_value_heads": None, "num_kv_shared_layers": 20, "rms_norm_eps": 1e-6,
        "rope_parameters": GEMMA4_ROPE, "sliding_window": 512, "tie_word_embeddings": True,
        "top_k_experts": None, "use_bidirectional_attention": None, "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma-4-26B-A4B": {
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"],
        **sizes(262144, 2816, 2112, 30, 16, 8, 262144), "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping": 30.0, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "moe_intermediate_size": 704,
        "num_experts": 128, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6,
        "rope_parameters": GEMMA4_ROPE, "sliding_window": 1024, "tie_word_embeddings": True,
        "top_k_experts": 8, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 262144,
    },
    "Llama-4-Scout-17B-16E": {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"],
        **sizes(202048, 5120, 8192, 48, 40, 8, 10485760), **LLAMA4, "num_local_experts": 16, "use_qk_norm": True,
        "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192, "interleave_moe_layer_step": 1,
        "moe_layers": list(range(48)), "no_rope_layers": [1, 1, 1, 0] * 12,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Llama-4-Maverick-17B-128E": {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"],
        **sizes(202048, 5120, 8192, 48, 40, 8, 1048576), **LLAMA4, "num_local_experts": 128, "use_qk_norm": False,
        "_attn_implementation_autoset": True, "interleave_moe_layer_step": 2, "no_rope_layers": [],
        "rope_scaling": None,
    },
    "Phi-3.5-MoE": {
        "model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"],
        **sizes(32064, 4096, 6400, 32, 32, 8, 131072), "attention_bias": True, "attention_dropout": 0.0,
        "hidden_act": "silu", "hidden_dropout": 0.0, "input_jitter_noise": 0.01, "lm_head_bias": True,
        "num_experts_per_tok": 2, "num_local_experts": 16, "original_max_position_embeddings": 4096,
        "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {
            "long_factor": [2.0] * 64, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
            "short_factor": [1.0 + i / 100 for i in range(64)], "short_mscale": 1.243163121016122, "type": "longrope",
        },
        "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 131072,
        "tie_word_embeddings": False,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"],
        **sizes(49152, 3072, 12288, 30, 24, 2, 16384), "attention_dropout": 0.1, "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm",
        "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True,
    },
}  # fmt: skip
