"""The type of each entry of a `config.json` that a family reads. Wrong types are refused before parsing.

`actors/shared/checkpoint.py` reads entries with it too, so no torch.

What must always hold: an entry that passes has the type that its readers expect; null means the same as absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

MOST = 2**31 - 1
"""Largest integer: a larger one is a mistake, and would cause an obscure error later."""
LARGEST = 1e15
"""Largest other number; the largest bases of rotary embeddings are a millionth of it."""
SMALLEST = 1e-30
"""Smallest number that is not 0: a smaller one is a mistake, and its square or its inverse might be none."""
MAX_DEPTH = 100
"""Deepest nesting; three levels are usual."""


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or SMALLEST <= abs(value) <= LARGEST  # false for NaN


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -MOST <= value <= MOST


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or value in (0, 1)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list_of(is_one: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_one, value))


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _named(
    names: str, expected: str, is_one: Callable[[object], bool]
) -> dict[str, tuple[str, Callable[[object], bool]]]:
    return dict.fromkeys(names.split(), (expected, is_one))


_TYPES = {
    **_named("architectures layer_types", "a list of names", _is_list_of(_is_text)),
    **_named("rope_scaling rope_parameters per_layer_config", "an object", _is_object),
    **_named("dtype torch_dtype hidden_act hidden_activation activation", "a name", _is_text),
    **_named("topk_method scoring_func position_embedding_type normalization_function", "a name", _is_text),
    **_named("mlp_only_layers no_rope_layers moe_layers", "a list of integers", _is_list_of(is_whole)),
    **_named("sliding_window_pattern", "an integer or letters", lambda value: is_whole(value) or _is_text(value)),
    **_named(
        "tie_word_embeddings attention_bias attention_out_bias qkv_bias use_sliding_window norm_topk_prob "
        "rope_interleave use_qk_norm use_qkv_bias use_parallel_residual use_bias lm_head_bias attention_k_eq_v "
        "use_double_wide_mlp enable_moe_block altup_correct_scale",
        "true or false",
        _is_flag,
    ),
    **_named("activation_sparsity_pattern", "a list of numbers", _is_list_of(is_number)),
    **_named(
        "intermediate_size",
        "an integer, or a list of them",
        lambda value: is_whole(value) or _is_list_of(is_whole)(value),
    ),
    **_named("attn_temperature_tuning", "true, false or an integer", lambda value: _is_flag(value) or is_whole(value)),
    **_named(
        "rms_norm_eps rope_theta rope_local_base_freq partial_rotary_factor attn_logit_softcapping "
        "final_logit_softcapping embedding_multiplier residual_multiplier attention_multiplier logits_scaling "
        "swiglu_alpha swiglu_limit routed_scaling_factor layer_norm_eps norm_epsilon logit_scale "
        "router_jitter_noise floor_scale attn_scale",
        "a number",
        is_number,
    ),
    **_named(
        "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings sliding_window "
        "max_window_layers query_pre_attn_scalar no_rope_layer_interval num_experts num_local_experts "
        "shared_expert_intermediate_size num_experts_per_tok decoder_sparse_step experts_per_token "
        "initial_context_length kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts "
        "n_shared_experts moe_layer_freq first_k_dense_replace n_group topk_group num_nextn_predict_layers "
        "num_mtp_layers shared_intermediate_size global_head_dim num_global_key_value_heads num_kv_shared_layers "
        "hidden_size_per_layer_input vocab_size_per_layer_input top_k_experts intermediate_size_mlp "
        "interleave_moe_layer_step attention_chunk_size altup_num_inputs altup_active_idx laurel_rank",
        "an integer",
        is_whole,
    ),
}
_ROPE_TYPES = {
    **_named("rope_type type", "a name", _is_text),
    **_named("truncate", "true or false", _is_flag),
    **_named("short_factor long_factor", "a list of numbers", _is_list_of(is_number)),
    **_named("full_attention sliding_attention", "an object", _is_object),
}
"""Types of rotary parameters; all others are numbers. Objects have these entries for one type of layers."""


def check_types(data: dict[str, Any]) -> None:
    """Raises ValueError naming the first entry of a wrong type."""
    for name, (expected, is_one) in _TYPES.items():
        _check(name, data.get(name), expected, is_one)
    for name in ("rope_scaling", "rope_parameters"):
        for part, value in (data.get(name) or {}).items():
            if isinstance(value, dict):
                for inner, number in value.items():
                    _check_rope(f"{name}.{part}", inner, number)
            else:
                _check_rope(name, part, value)


def _check_rope(path: str, name: str, value: object) -> None:
    expected, is_one = _ROPE_TYPES.get(name, ("a number", is_number))
    _check(f"{path}.{name}", value, expected, is_one)


def _check(name: str, value: object, expected: str, is_one: Callable[[object], bool]) -> None:
    if value is not None and not is_one(value):
        raise ValueError(f"config.json: {name} is {shown(value)}, must be {expected}")


def shown(value: object) -> str:
    """Format a value for a message, shortened to 80 characters."""
    text = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def is_deep(value: object) -> bool:
    """Return whether a value is nested more than `MAX_DEPTH` levels, which could exhaust the stack of its readers."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
