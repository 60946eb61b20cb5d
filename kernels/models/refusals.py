"""Entries of `config.json` that we do not compute, and which are therefore refused by name at start.

Each family names the entries that it reads; `check_entries` checks all others.

What must always hold: an entry that changes what the architecture computes is read by its family, or refused here
unless its value asks for what is computed anyway. Unknown entries are named in a warning.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


_NOTHING: tuple[Any, ...] = (None, False, 0, 0.0, (), [], {}, "")

_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _words(
            """
            compression_config attention_bias mlp_bias qkv_bias use_qkv_bias use_bias bias lm_head_bias pruned_heads
            layers_block_type mamba_n_heads attention_k_eq_v use_double_wide_mlp enable_moe_block top_k_experts
            per_layer_config block_configs activation_sparsity_pattern altup_num_inputs laurel_rank
            use_sliding_window attention_sinks attn_output_gate attn_temperature_tuning alibi clip_qkv kv_lora_rank
            q_lora_rank num_kv_shared_layers attention_out_bias qk_layernorm qk_norm use_qk_norm
            use_bidirectional_attention
            no_rope_layers no_rope_layer_interval rope_interleaved use_mrope
            adapter_config first_k_dense_replace hidden_size_per_layer_input mlp_only_layers n_routed_experts
            num_experts num_experts_per_tok num_local_experts num_nextn_predict_layers parallel_attn
            shared_expert_intermediate_size experts_per_token
            add_cross_attention audio_config is_encoder_decoder text_config vision_config
            """
        ),
        _NOTHING,
    ),
    **dict.fromkeys(
        _words(
            """
            sliding_window sliding_window_pattern attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar
            attention_chunk_size attention_multiplier rope_local_base_freq dim_model_base decoder_sparse_step
            moe_intermediate_size swiglu_alpha swiglu_limit shared_intermediate_size router_jitter_noise
            intermediate_size_mlp moe_layers interleave_moe_layer_step
            """
        ),
        (None,),
    ),
    **dict.fromkeys(
        _words(
            """
            full_attn_mod interpolate_factor rotary_pct embedding_multiplier logit_scale logits_scaling
            residual_multiplier scale_depth scale_emb
            """
        ),
        (None, 1),
    ),
    "is_causal": (None, True),
    "position_embedding_type": (None, "absolute", "rope"),
}
"""Entries, and their values that change nothing."""

_NEUTRAL = _words(
    """
    _name_or_path architectures auto_map bos_token_id dtype eos_token_id model_type pad_token_id torch_dtype
    transformers_version unsloth_version sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    max_length temperature top_k top_p do_sample repetition_penalty id2label label2id problem_type task_specific_params
    attention_dropout attn_pdrop embd_pdrop hidden_dropout resid_pdrop residual_dropout initializer_range
    initializer_factor output_attentions output_hidden_states output_router_logits router_aux_loss_coef return_dict
    torchscript
    use_bfloat16 use_cache cache_implementation gradient_checkpointing is_decoder tie_encoder_decoder tokenizer_class
    finetuning_task chunk_size_feed_forward pretraining_tp attn_implementation _attn_implementation
    _attn_implementation_autoset quantization_config
    altup_coef_clip altup_lr_multiplier
    input_jitter_noise init_method for_llm_compressor
    aux_loss_alpha seq_aux ep_size qk_head_dim embedding_dropout
    is_matryoshka matryoshka_dimensions classifier_from_token is_original_qwen3_reranker sentence_transformers
    sbert_ce_default_activation_function
    """
)
"""Entries about training, tokens, memory or speed, which do not change what is computed, and `quantization_config`,
which `checkpoints/formats.py` reads or refuses. The last ones are read by `actors/shared/pooling_files.py`."""

COMMON = _words(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    rms_norm_eps max_position_embeddings tie_word_embeddings layer_types rope_theta rope_scaling rope_parameters
    partial_rotary_factor original_max_position_embeddings hidden_act hidden_activation
    """
)
"""Entries that every family reads."""


def check_entries(data: dict[str, Any], *, read: str, activation: str) -> None:
    """Raises ValueError for an entry that asks for something we do not compute.

    `read` names the entries that the family reads besides the common ones, separated by spaces; `activation` is the one
    that it computes, as `hidden_act` or `hidden_activation` name it.
    """
    for name in ("hidden_act", "hidden_activation"):
        if data.get(name, activation) not in (None, activation):
            raise ValueError(f"config.json: {name} {data[name]!r} is not supported, only {activation!r}")
    unknown = []
    for name, value in sorted(data.items()):
        if name in COMMON | _NEUTRAL | _words(read):
            continue
        if name not in _REFUSED:
            unknown.append(name)
        elif value not in _REFUSED[name] and not (name == "sliding_window" and data.get("use_sliding_window") is False):
            shown = value.get("quant_method") if isinstance(value, dict) else repr(value)
            raise ValueError(f"config.json: {name} {shown or '{...}'} is not supported for this architecture")
    if unknown:
        _log.warning("ignoring unknown entries of config.json: %s", ", ".join(unknown))
