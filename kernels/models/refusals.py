"""Entries of `config.json` that we do not compute, and which are therefore refused by name at start.

Each family names the entries that it reads; `check_entries` checks all others.

What must always hold: an entry that changes what the architecture computes is read by its family, or refused here
unless its value asks for what is computed anyway. An entry that is not understood is refused unless the operator has
named it; null is the same as absent.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from ..checkpoints.formats import find_unknown
from .known_entries import BESIDE_DECODER, NEUTRAL, words

_log = logging.getLogger(__name__)


_NOTHING: tuple[Any, ...] = (None, False, 0, 0.0, (), [], {}, "")

_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        words(
            """
            compression_config quantization attention_bias mlp_bias qkv_bias use_qkv_bias use_bias bias lm_head_bias
            pruned_heads
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
        words(
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
        words(
            """
            full_attn_mod interpolate_factor rotary_pct embedding_multiplier logit_scale logits_scaling
            residual_multiplier scale_depth scale_emb
            """
        ),
        (None, 1),
    ),
    "cross_attention_hidden_size": (None,),
    "is_causal": (None, True),
    "is_llama_config": (None, True),
    "position_embedding_type": (None, "absolute", "rope"),
}
"""Entries, and their values that change nothing."""

COMMON = words(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    rms_norm_eps max_position_embeddings tie_word_embeddings layer_types rope_theta rope_scaling rope_parameters
    partial_rotary_factor original_max_position_embeddings hidden_act hidden_activation activation
    """
)
"""Entries that every family reads."""


_INNER = "text_config."
_QUANTIZATION = "quantization_config."
_MOST_NAMED = 100
"""Entries in one message."""
_GATED = {"silu": "swiglu"}
"""What `activation`, which Falcon 3 has beside `hidden_act`, calls an MLP that is gated so."""


def check_entries(data: dict[str, Any], *, read: str, activation: str) -> list[str]:
    """Return the entries that are not understood. Raises ValueError for one that asks for what we do not compute.

    `read` names the entries that the family reads besides the common ones, separated by spaces; `activation` is the one
    that it computes, as `hidden_act` or `hidden_activation` name it.
    """
    for name in ("hidden_act", "hidden_activation", "activation"):
        others = (None, _GATED.get(activation)) if name == "activation" else (None,)
        if data.get(name, activation) not in (activation, *others):
            raise ValueError(f"config.json: {name} {data[name]!r} is not supported, only {activation!r}")
    unknown = []
    for name, value in sorted(data.items()):
        if name in COMMON | NEUTRAL | words(read):
            continue
        if name not in _REFUSED:
            unknown += [name] if value is not None else []
        elif value not in _REFUSED[name] and not (name == "sliding_window" and data.get("use_sliding_window") is False):
            shown = value.get("quant_method") if isinstance(value, dict) else repr(value)
            raise ValueError(f"config.json: {name} {shown or '{...}'} is not supported for this architecture")
    return unknown + [f"{_QUANTIZATION}{name}" for name in find_unknown(data.get("quantization_config"))]


def unknown_beside(outer: dict[str, Any], decoder: dict[str, Any], unknown: Collection[str]) -> list[str]:
    """Return the entries that are not understood of a model with towers, of whose decoder some are `unknown`.

    An entry of the whole model says nothing new if the decoder's is the same.
    """
    own = {name for name, value in outer.items() if value is not None and value != decoder.get(name)}
    inner = (name if name.startswith(_QUANTIZATION) else f"{_INNER}{name}" for name in unknown)
    return sorted([*inner, *(own - NEUTRAL - BESIDE_DECODER)])


def refuse_unknown(unknown: Collection[str], ignored: Collection[str]) -> None:
    """Raises ValueError naming the entries that are not understood, or those to be ignored that are none of them."""
    if others := [name for name in ignored if name not in unknown]:
        raise ValueError(
            f"--ignore-config-entries: {', '.join(others)} is no entry of config.json, or one that is understood and "
            "thus not ignored"
        )
    if refused := [name for name in unknown if name not in ignored]:
        more = f" and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
        names = refused[:_MOST_NAMED]
        raise ValueError(
            f"config.json has entries that are not understood: {', '.join(names)}{more}. Results may depend on them; "
            f"if you know that they do not, add --ignore-config-entries {','.join([*ignored, *names])} "
            "(docs/operate/models.md)"
        )
    if ignored:
        _log.warning("ignoring entries of config.json, as --ignore-config-entries says: %s", ", ".join(ignored))
