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
    # other numbers or other matrices
    "compression_config": _NOTHING,
    "attention_bias": _NOTHING,
    "mlp_bias": _NOTHING,
    "qkv_bias": _NOTHING,
    "use_qkv_bias": _NOTHING,
    "use_bias": _NOTHING,
    "bias": _NOTHING,
    "lm_head_bias": _NOTHING,
    "full_attn_mod": (None, 1),
    "interpolate_factor": (None, 1),
    "pruned_heads": _NOTHING,
    "per_layer_config": _NOTHING,
    "block_configs": _NOTHING,
    # other attention
    "sliding_window": (None,),
    "use_sliding_window": _NOTHING,
    "sliding_window_pattern": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attention_sinks": _NOTHING,
    "attn_output_gate": _NOTHING,
    "attn_temperature_tuning": _NOTHING,
    "alibi": _NOTHING,
    "clip_qkv": _NOTHING,
    "is_causal": (None, True),
    "kv_lora_rank": _NOTHING,
    "num_kv_shared_layers": _NOTHING,
    "qk_layernorm": _NOTHING,
    "qk_norm": _NOTHING,
    "use_qk_norm": _NOTHING,
    "use_bidirectional_attention": _NOTHING,
    # other rotary embedding
    "no_rope_layers": _NOTHING,
    "no_rope_layer_interval": _NOTHING,
    "position_embedding_type": (None, "absolute", "rope"),
    "rope_interleaved": _NOTHING,
    "use_mrope": _NOTHING,
    "rope_local_base_freq": (None,),
    "rotary_pct": (None, 1.0),
    # other scales
    "dim_model_base": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "scale_depth": (None, 1, 1.0),
    "scale_emb": (None, 1, 1.0),
    # other layers
    "adapter_config": _NOTHING,
    "decoder_sparse_step": (None,),
    "first_k_dense_replace": _NOTHING,
    "hidden_size_per_layer_input": _NOTHING,
    "mlp_only_layers": _NOTHING,
    "moe_intermediate_size": (None,),
    "n_routed_experts": _NOTHING,
    "num_experts": _NOTHING,
    "num_experts_per_tok": _NOTHING,
    "num_local_experts": _NOTHING,
    "num_nextn_predict_layers": _NOTHING,
    "parallel_attn": _NOTHING,
    "shared_expert_intermediate_size": _NOTHING,
    # more than a text decoder
    "add_cross_attention": _NOTHING,
    "audio_config": _NOTHING,
    "is_encoder_decoder": _NOTHING,
    "text_config": _NOTHING,
    "vision_config": _NOTHING,
}
"""Entries, and their values that change nothing."""

_NEUTRAL = _words(
    """
    _name_or_path architectures auto_map bos_token_id dtype eos_token_id model_type pad_token_id torch_dtype
    transformers_version unsloth_version sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    max_length temperature top_k top_p do_sample repetition_penalty id2label label2id problem_type task_specific_params
    attention_dropout attn_pdrop embd_pdrop hidden_dropout resid_pdrop initializer_range initializer_factor
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef return_dict torchscript
    use_bfloat16 use_cache cache_implementation gradient_checkpointing is_decoder tie_encoder_decoder tokenizer_class
    finetuning_task chunk_size_feed_forward pretraining_tp attn_implementation _attn_implementation
    _attn_implementation_autoset quantization_config
    """
)
"""Entries about training, tokens, memory or speed, which do not change what is computed, and `quantization_config`,
which `checkpoints/formats.py` reads or refuses."""

_COMMON = _words(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    rms_norm_eps max_position_embeddings tie_word_embeddings layer_types rope_theta rope_scaling rope_parameters
    partial_rotary_factor original_max_position_embeddings hidden_act hidden_activation
    """
)
"""Entries that every family reads."""


def check_entries(data: dict[str, Any], *, read: str, activation: str = "silu") -> None:
    """Raises ValueError for an entry that asks for something we do not compute.

    `read` names the entries that the family reads besides the common ones, separated by spaces; `activation` is the one
    that it computes, as `hidden_act` or `hidden_activation` name it.
    """
    for name in ("hidden_act", "hidden_activation"):
        if data.get(name, activation) not in (None, activation):
            raise ValueError(f"config.json: {name} {data[name]!r} is not supported, only {activation!r}")
    unknown = []
    for name, value in sorted(data.items()):
        if name in _COMMON | _NEUTRAL | _words(read):
            continue
        if name not in _REFUSED:
            unknown.append(name)
        elif value not in _REFUSED[name] and not (name == "sliding_window" and data.get("use_sliding_window") is False):
            shown = value.get("quant_method") if isinstance(value, dict) else repr(value)
            raise ValueError(f"config.json: {name} {shown or '{...}'} is not supported for this architecture")
    if unknown:
        _log.warning("ignoring unknown entries of config.json: %s", ", ".join(unknown))


def is_classified(name: str, *, read: str = "") -> bool:
    """Return whether an entry is read, refused or known to change nothing."""
    return name in _COMMON | _NEUTRAL | _words(read) or name in _REFUSED
