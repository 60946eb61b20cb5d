"""The configurations of the tests' small checkpoints: at least one of every family.

`kernel_checkpoints.py` makes checkpoints of them. What must always hold: new ones are added at the end, since the seed
of a checkpoint's weights is its place.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

VOCAB_SIZE = 320

_SHARED = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # small enough that within the tests' positions some frequencies are scaled, some interpolated, some unchanged
    "original_max_position_embeddings": 64,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 0.5,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.5, 4.0],
    "long_factor": [2.0, 8.0, 20.0, 40.0],
}
_LONGROPE_OF_PHIMOE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0 + number / 4 for number in range(8)],
    "long_factor": [2.0 + number for number in range(8)],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
}
_GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

_GEMMA4 = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 48,
    "num_global_key_value_heads": 1,
    "sliding_window": 30,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}

_LLAMA4 = {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

_OLMO3 = {
    "full_attention": _YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

_LATENT = {
    "num_attention_heads": 4,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "moe_intermediate_size": 40,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    # caps small enough to matter; a scale other than that of head_dim
    "gemma2": lambda: Gemma2Config(
        **_SHARED, intermediate_size=100, num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=33,
        query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
    ),
    # three layers, so that there is one of each kind and two rotary embeddings; a hidden size whose root bfloat16 lacks
    "gemma3": lambda: Gemma3TextConfig(
        **{**_SHARED, "num_hidden_layers": 3, "hidden_size": 76}, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, sliding_window=20, query_pre_attn_scalar=40, final_logit_softcapping=8.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=_GEMMA3,
    ),
    "llama": lambda: LlamaConfig(
        **_SHARED, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "llama-rope3": lambda: LlamaConfig(
        **_SHARED, intermediate_size=160, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=True, rope_parameters=_LLAMA3,
    ),
    # a window in all layers, longer than a chunk of keys; head_dim other than hidden/heads
    "mistral": lambda: MistralConfig(
        **_SHARED, intermediate_size=128, num_attention_heads=4, num_key_value_heads=1, head_dim=32, sliding_window=270,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    ),
    # half of each head is rotated, with its own factors
    "phi3": lambda: Phi3Config(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, sliding_window=100,
        original_max_position_embeddings=1024, pad_token_id=None, rope_parameters=_LONGROPE,
    ),
    "phi4": lambda: Phi3Config(
        **_SHARED, intermediate_size=160, num_attention_heads=2, num_key_value_heads=1, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 250_000.0, "partial_rotary_factor": 0.75},
    ),
    # a window from the second layer on, tied
    "qwen2": lambda: Qwen2Config(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=50, max_window_layers=1,
    ),
    # yarn that changes every frequency within the tests' positions; no window
    "qwen2-yarn": lambda: Qwen2Config(
        **_SHARED, intermediate_size=96, num_attention_heads=2, num_key_value_heads=2, rope_parameters=_YARN,
    ),
    # a dense layer, and one whose experts' width is not divisible by any vector length
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SHARED, intermediate_size=96, moe_intermediate_size=40, num_experts=11, num_experts_per_tok=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, norm_topk_prob=True, mlp_only_layers=[0],
        use_sliding_window=False,
    ),
    # an MLP width not divisible by any vector length, biases, three query heads per key/value head
    "qwen3-odd": lambda: Qwen3Config(
        **_SHARED, intermediate_size=100, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=False, attention_bias=True, use_sliding_window=False,
    ),
    # head_dim other than hidden/heads, tied; sharded
    "qwen3-tied": lambda: Qwen3Config(
        **_SHARED, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        tie_word_embeddings=True, use_sliding_window=False,
    ),
    # norms of whole projections, after attention and MLP
    "olmo2": lambda: Olmo2Config(
        **_SHARED, intermediate_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
    ),
    # another rotary embedding in the layer with a window
    "olmo3": lambda: Olmo3Config(
        **_SHARED, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, sliding_window=40,
        layer_types=["sliding_attention", "full_attention"], rope_parameters=_OLMO3,
    ),
    # norms of heads; a layer without a rotary embedding
    "exaone4": lambda: Exaone4Config(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, sliding_window=50,
        layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True,
    ),
    # multipliers other than 1, and an epsilon large enough to matter
    "granite": lambda: GraniteConfig(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, embedding_multiplier=12.0,
        residual_multiplier=0.22, attention_multiplier=0.1, logits_scaling=3.0, rms_norm_eps=1e-2,
        tie_word_embeddings=True,
    ),
    # a layer without a rotary embedding, with a window
    "smollm3": lambda: SmolLM3Config(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=1, no_rope_layers=[0, 1],
        use_sliding_window=True, sliding_window=30, pad_token_id=None,
    ),
    # neighbours are rotated together, in half of each head
    "glm": lambda: GlmConfig(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, pad_token_id=None,
    ),
    # norms before and after attention and MLP
    "glm4": lambda: Glm4Config(
        **_SHARED, intermediate_size=100, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
        attention_bias=False, pad_token_id=None,
    ),
    "ministral": lambda: MinistralConfig(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=60,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "seed-oss": lambda: SeedOssConfig(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        attention_out_bias=True, pad_token_id=None,
    ),
    # a shared expert; biases, and a window in the first layer; an expert that is not chosen has a small weight anyway
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **_SHARED, intermediate_size=96, moe_intermediate_size=40, shared_expert_intermediate_size=56, num_experts=5,
        num_experts_per_tok=4, num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=50,
    ),
    # norms of whole projections before experts
    "olmoe": lambda: OlmoeConfig(
        **_SHARED, intermediate_size=48, num_experts=7, num_experts_per_tok=6, num_attention_heads=4,
        num_key_value_heads=2, norm_topk_prob=True,
    ),
    # sinks, a window in the first layer, biases everywhere, a limit that many gates reach; as in qwen2-moe, an expert
    # that is not chosen has a small weight anyway
    "gpt-oss": lambda: GptOssConfig(
        **_SHARED, intermediate_size=64, num_local_experts=5, num_experts_per_tok=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, sliding_window=50, swiglu_limit=1.5, pad_token_id=None,
        rope_parameters={**_YARN, "truncate": False},
    ),
    # queries without a latent; a factor of scores beside yarn's; a dense layer, and a shared expert of two widths
    "deepseek-v2-lite": lambda: DeepseekV2Config(
        **_SHARED, **_LATENT, intermediate_size=96, q_lora_rank=None, n_routed_experts=6, num_experts_per_tok=3,
        n_shared_experts=2, first_k_dense_replace=1, rope_parameters=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    # a latent of queries; experts of three groups of four
    "deepseek-v2": lambda: DeepseekV2Config(
        **_SHARED, **_LATENT, intermediate_size=96, q_lora_rank=40, n_routed_experts=8, num_experts_per_tok=5,
        topk_method="group_limited_greedy", n_group=4, topk_group=3, routed_scaling_factor=1.25,
    ),
    # biases that decide which experts are chosen; another factor of cosines than of scores
    "deepseek-v3": lambda: DeepseekV3Config(
        **_SHARED, **_LATENT, intermediate_size=96, q_lora_rank=32, n_routed_experts=9, num_experts_per_tok=5,
        n_group=3, topk_group=2, routed_scaling_factor=0.75, first_k_dense_replace=1, num_mtp_layers=0,
        num_key_value_heads=4, rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    ),
    # norms and biases of heads, of which half is rotated; experts in one group
    "glm4-moe": lambda: Glm4MoeConfig(
        **_SHARED, intermediate_size=96, moe_intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
        n_routed_experts=6, num_experts_per_tok=4, routed_scaling_factor=0.75, use_qk_norm=True, attention_bias=True,
        num_mtp_layers=0,
    ),
    # attention and MLP of one norm; a layer without a window, and without a rotary embedding
    "cohere2": lambda: Cohere2Config(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, sliding_window=50,
        layer_types=["sliding_attention", "full_attention"], attention_bias=True, logit_scale=0.5,
    ),
    "stablelm": lambda: StableLmConfig(
        **_SHARED, intermediate_size=100, num_attention_heads=2, num_key_value_heads=1, use_qkv_bias=True,
        layer_norm_eps=1e-2,
    ),
    "stablelm-parallel": lambda: StableLmConfig(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, use_parallel_residual=True,
    ),
    # MLPs without a gate, with biases
    "starcoder2": lambda: Starcoder2Config(
        **_SHARED, intermediate_size=100, num_attention_heads=4, num_key_value_heads=2, sliding_window=60,
    ),
    # multipliers as in granite; experts stored as one tensor
    "granite-moe": lambda: GraniteMoeConfig(
        **_SHARED, intermediate_size=40, num_local_experts=6, num_experts_per_tok=4, num_attention_heads=4,
        num_key_value_heads=2, embedding_multiplier=8.0, residual_multiplier=0.22, attention_multiplier=0.1,
        logits_scaling=2.0, rms_norm_eps=1e-2, tie_word_embeddings=True,
    ),
    # a shared MLP alone, rotated; biases
    "granite-4": lambda: GraniteMoeHybridConfig(
        **_SHARED, intermediate_size=48, shared_intermediate_size=96, num_local_experts=0, num_experts_per_tok=0,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["full_attention"] * 2, attention_bias=True,
        position_embedding_type="rope", embedding_multiplier=12.0, residual_multiplier=0.5, attention_multiplier=0.2,
        mamba_n_heads=8,
    ),
    # a shared MLP beside experts; not rotated
    "granite-4-moe": lambda: GraniteMoeHybridConfig(
        **_SHARED, intermediate_size=48, shared_intermediate_size=56, num_local_experts=5, num_experts_per_tok=4,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["full_attention"] * 2, mamba_n_heads=8,
        residual_multiplier=0.22, attention_multiplier=0.3, tie_word_embeddings=True,
    ),
    # experts that SparseMixer chooses, of whose weights others' scores are a part; biases of norms and of the head
    "phimoe": lambda: PhimoeConfig(
        **_SHARED, intermediate_size=40, num_local_experts=6, num_attention_heads=4, num_key_value_heads=2,
        router_jitter_noise=0.3, attention_bias=True, lm_head_bias=True, sliding_window=60, pad_token_id=None,
        rope_parameters=_LONGROPE_OF_PHIMOE,
    ),
    # other heads in layers without a window, whose values are their keys; layers that use others' keys, and have wider
    # MLPs; per-layer inputs, and experts beside MLPs
    "gemma4": lambda: Gemma4TextConfig(
        **{**_SHARED, "num_hidden_layers": 6}, **_GEMMA4, attention_k_eq_v=True,
        layer_types=["sliding_attention", "full_attention", "full_attention"] * 2, num_kv_shared_layers=3,
        use_double_wide_mlp=True, enable_moe_block=True, num_experts=5, top_k_experts=4, moe_intermediate_size=40,
        hidden_size_per_layer_input=16, final_logit_softcapping=5.0,
    ),
    # values of their own, biases, and none of the rest
    "gemma4-plain": lambda: Gemma4TextConfig(
        **_SHARED, **_GEMMA4, hidden_size_per_layer_input=0, attention_bias=True, tie_word_embeddings=False,
    ),
    # chunks shorter than a block, and queries whose scale grows in the layer that is not rotated; a dense layer between
    # mixtures, in which the expert that is not chosen has the smallest weight
    "llama4": lambda: Llama4TextConfig(
        **{**_SHARED, "num_hidden_layers": 3}, **_LLAMA4, intermediate_size_mlp=96, num_local_experts=5,
        num_experts_per_tok=4, moe_layers=[0, 2], no_rope_layers=[1, 0, 1], attention_chunk_size=14, floor_scale=9,
        attn_scale=0.3, rope_parameters=_LLAMA3,
    ),
    # chunks in the layer that is not rotated; biases, one expert for each token, and neither norms nor scales
    "llama4-plain": lambda: Llama4TextConfig(
        **_SHARED, **_LLAMA4, intermediate_size_mlp=100, num_local_experts=3, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0], layer_types=["full_attention", "chunked_attention"], attention_chunk_size=270,
        use_qk_norm=False, attn_temperature_tuning=False, attention_bias=True, tie_word_embeddings=True,
    ),
    # three copies, of which the last is active; two sparse layers of different widths; layers that use others' keys;
    # tokens without a per-layer input of their own
    "gemma3n": lambda: Gemma3nTextConfig(
        **{**_SHARED, "num_hidden_layers": 6}, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=[96, 100, 96, 96, 128, 96], activation_sparsity_pattern=[0.9, 0.6, 0.0, 0.0, 0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=3, sliding_window=30,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=300, altup_num_inputs=3, altup_active_idx=2,
        laurel_rank=12, final_logit_softcapping=5.0, rope_parameters=_GEMMA3,
    ),
    # as many copies as published, and none of the rest; biases
    "gemma3n-plain": lambda: Gemma3nTextConfig(
        **_SHARED, num_attention_heads=4, num_key_value_heads=1, head_dim=16, intermediate_size=96,
        layer_types=["full_attention", "sliding_attention"], num_kv_shared_layers=0, sliding_window=50,
        hidden_size_per_layer_input=24, vocab_size_per_layer_input=VOCAB_SIZE, altup_correct_scale=False,
        laurel_rank=16, attention_bias=True, tie_word_embeddings=False,
    ),
    # rotated queries that grow with their positions
    "ministral3": lambda: Ministral3Config(
        **_SHARED, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, pad_token_id=None,
        rope_parameters={
            **_YARN, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
}  # fmt: skip
