"""Configurations that differ in one entry from those of the tests' checkpoints, and what is known of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatch
from typing import Any

import attrs

from quipu.kernels.models.families import FAMILIES
from quipu.kernels.models.known_entries import words
from quipu.kernels.models.refusals import COMMON
from tests.kernels.family_configs import CONFIGS
from tests.kernels.models.parsed_configs import config_of
from tests.kernels.models.test_null_flags import flags_of

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 0.5,
}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 5e4},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": _YARN,
    "yarn-mscale": _YARN | {"mscale": 0.8, "mscale_all_dim": 0.6},
    "yarn-exact": _YARN | {"truncate": False, "attention_factor": 1.3},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_BESIDE_ROPE = {"ministral3": {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 10}}
"""Rotary entries that a checkpoint must have, whatever the kind."""
_VALUES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, "heads"),
    "head_dim": (48,),
    "rms_norm_eps": (4e-2,),
    "layer_norm_eps": (5e-2,),
    "norm_epsilon": (1e-2,),
    "sliding_window": (7, None),
    "layer_types": ("full", "sliding", "mixed"),
    "max_window_layers": (0, 2),
    "final_logit_softcapping": (3.0, None),
    "attn_logit_softcapping": (1.5, None),
    "query_pre_attn_scalar": (50,),
    "logit_scale": (2.0,),
    "embedding_multiplier": (3.0,),
    "residual_multiplier": (0.4,),
    "attention_multiplier": (0.6,),
    "logits_scaling": (0.5,),
    "position_embedding_type": ("nope", "rope"),
    "original_max_position_embeddings": (512,),
    "no_rope_layers": ("none", "all"),
    "no_rope_layer_interval": (2,),
    "attention_chunk_size": (5, 64),
    "floor_scale": (3,),
    "attn_scale": (0.8,),
    # experts
    "num_experts_per_tok": (1, 2),
    "top_k_experts": (1,),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1.7,),
    "n_shared_experts": (1, 2),
    "shared_expert_intermediate_size": (24,),
    "shared_intermediate_size": (24,),
    "first_k_dense_replace": (0, 2),
    "topk_method": ("greedy", "group_limited_greedy"),
    "decoder_sparse_step": (2,),
    "mlp_only_layers": ([], [1]),
    "moe_layers": ([],),
    "interleave_moe_layer_step": (2,),
    "swiglu_limit": (0.4,),
    "router_jitter_noise": (0.05,),
    # latents, and what Gemma 3n and 4 have
    "q_lora_rank": (None, 24),
    "num_kv_shared_layers": (0,),
    "altup_active_idx": (1,),
    "laurel_rank": (5,),
    "hidden_size_per_layer_input": (8,),
    "activation_sparsity_pattern": ([0.3, 0.0, 0.8, 0.0, 0.0, 0.0],),
    "global_head_dim": (16,),
    "num_global_key_value_heads": (2,),
    "vocab_size_per_layer_input": (310,),
}
"""Values of entries, or their names where they depend on the configuration."""
UNVARIED = words(
    # sizes that all checkpoints differ in
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings "
    "intermediate_size_mlp moe_intermediate_size num_experts num_local_experts n_routed_experts kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim altup_num_inputs",
    # older spellings, and entries that transformers' classes do not have or ignore: `test_accepted_entries.py`
    "rope_theta rope_scaling partial_rotary_factor hidden_act hidden_activation activation rope_local_base_freq "
    "sliding_window_pattern _sliding_window_pattern experts_per_token initial_context_length swiglu_alpha "
    "num_nextn_predict_layers num_mtp_layers moe_layer_freq scoring_func mlp_type norm_type "
    "use_parallel_block use_parallel_embedding use_gated_activation use_embedding_sharing order_of_interleaved_layers "
    "layer_switch normalization_function layers_block_type mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head "
    "mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit qkv_bias "
    # written by transformers for each layer, from other entries
    "per_layer_config use_bidirectional_attention",
)
"""Entries of which there is no variant."""
_DECIDE_TYPES = words("sliding_window use_sliding_window max_window_layers no_rope_layers no_rope_layer_interval")
_TYPES_FOLLOW = words(
    "smollm3 qwen2 qwen2-moe mistral phi3 starcoder2 phimoe exaone4 ministral llama4 llama4-plain qwen3-odd qwen3-tied "
    "qwen2-yarn"
)
"""Checkpoints whose `layer_types` follow from other entries if they are absent."""
_DECIDE_HEADS = words(
    "global_head_dim num_global_key_value_heads attention_k_eq_v num_key_value_heads head_dim layer_types"
)
_PARTLY = ("phi3", "phi4", "glm", "glm4", "glm4-moe", "stablelm", "stablelm-parallel")
_NESTED = ("gemma3", "gemma3n", "gemma3n-plain", "gemma4", "gemma4-plain", "olmo3")


@attrs.frozen
class Variant:
    name: str
    """Of the checkpoint that it differs from..."""
    key: str
    """...in this entry."""
    value: Any
    label: str
    """Of the value."""

    def __str__(self) -> str:
        return f"{self.name}-{self.key}-{self.label}"

    def config(self) -> dict[str, Any]:
        """Return its `config.json`, without entries that transformers derives from the one that was changed."""
        data = deepcopy(config_of(self.name))
        data[self.key] = deepcopy(self.value)
        if self.key in _DECIDE_TYPES and self.name in _TYPES_FOLLOW:
            data.pop("layer_types", None)
        if self.key in _DECIDE_HEADS:
            data.pop("per_layer_config", None)
        return data


def read_by(name: str) -> frozenset[str]:
    """Return the entries that the family of a checkpoint reads."""
    return COMMON | words(FAMILIES[config_of(name)["architectures"][0]].reads)


def had_by(name: str) -> frozenset[str]:
    """Return the entries that transformers' class of a checkpoint has."""
    fields = {field.name for field in dataclasses.fields(type(CONFIGS[name]()))}
    return frozenset(fields | config_of(name).keys())


def variants_of(name: str) -> Iterator[Variant]:
    """Yield all variants of a checkpoint that transformers can compute."""
    for variant in candidates_of(name):
        is_computed = not any(fnmatch(str(variant), pattern) for pattern in _UNCOMPUTED)
        if is_computed and variant.value != config_of(name).get(variant.key, ...):
            yield variant


def candidates_of(name: str) -> Iterator[Variant]:
    yield from _flags(name)
    yield from _ropes(name)
    yield from _values(name)


def _flags(name: str) -> Iterator[Variant]:
    config = config_of(name)
    for key, _ in flags_of(name):
        value = not config.get(key)
        yield Variant(name, key, value, str(value))


def _ropes(name: str) -> Iterator[Variant]:
    own = config_of(name).get("rope_parameters") or {}
    for kind, parameters in ROPES.items():
        if any(isinstance(value, dict) for value in own.values()):
            for layers in own:
                yield Variant(name, "rope_parameters", {**own, layers: parameters}, f"{layers}-{kind}")
        else:
            yield Variant(name, "rope_parameters", _BESIDE_ROPE.get(name, {}) | parameters, kind)


def _values(name: str) -> Iterator[Variant]:
    config, read = config_of(name), read_by(name) & had_by(name)
    num_layers = config["num_hidden_layers"]
    full, sliding = "full_attention", "chunked_attention" if name.startswith("llama4") else "sliding_attention"
    meant = {
        "heads": config["num_attention_heads"],
        "full": [full] * num_layers,
        "sliding": [sliding] * num_layers,
        "mixed": [full] * (num_layers - 1) + [sliding],
        "none": [0] * num_layers,
        "all": [1] * num_layers,
    }
    for key, values in _VALUES.items():
        if (
            key not in read
            or key not in config
            or (key in ("num_key_value_heads", "head_dim") and "kv_lora_rank" in read)
        ):
            continue
        for value in values:
            label = str(value).replace(" ", "")
            yield Variant(name, key, meant[value] if key in _LISTED and value in meant else value, label)


_LISTED = ("num_key_value_heads", "layer_types", "no_rope_layers")

_NEED_WINDOWS = words(
    "gemma2 gemma3 gemma3n gemma3n-plain gemma4 gemma4-plain olmo3 exaone4 ministral qwen2-moe gpt-oss cohere2"
)
_UNCOMPUTED = (
    *("phi[34]-rope_parameters-[ly]*", "phimoe-rope_parameters-[ly]*"),  # only `longrope` is allowed
    *(f"{name}-sliding_window-None" for name in _NEED_WINDOWS),
    *(f"{name}-layer_types-[sm]*" for name in ("qwen2-yarn", "qwen3-odd", "qwen3-tied", "granite-4", "granite-4-moe")),
    *("gemma4-layer_types-sliding", "gemma3n-layer_types-mixed"),  # layers share keys with none of their kind
    *("deepseek-v[23]-n_group-1", "deepseek-v2-lite-topk_method-group_limited_greedy"),  # groups without numbers
    "phimoe-original_max_position_embeddings-512",  # which `rope_parameters` contradict
    *("gemma4-vocab_size_per_layer_input-310", "gemma4-plain-enable_moe_block-True"),
    *("gemma3n*-final_logit_softcapping-None", "gemma3n-plain-activation_sparsity_pattern-*"),
)
"""Variants that transformers refuses, or fails to compute."""


def why_refused(variant: Variant) -> str | None:
    """Return what of a variant is refused here, and computed by transformers; None: nothing."""
    if variant.key == "rope_parameters":
        if variant.label.endswith("partial") and variant.name not in _PARTLY:
            return "partial_rotary_factor 0.5 is not supported"
        if variant.label.endswith("yarn-exact") and variant.name in _NESTED:
            return "truncate false is not supported"
        if variant.name == "llama4" and variant.label.startswith("yarn"):
            return "an attention_factor of"
    return REFUSED.get(str(variant))


REFUSED = {
    "qwen3-moe-use_sliding_window-True": "sliding_window is null",
    "deepseek-v3-topk_group-1": "num_experts_per_tok is 5, must not exceed",
    "deepseek-v2-topk_group-1": "num_experts_per_tok is 5, must not exceed",
    "deepseek-v2-norm_topk_prob-True": "norm_topk_prob True is not supported",
    "deepseek-v2-lite-norm_topk_prob-True": "norm_topk_prob True is not supported",
    "phimoe-num_experts_per_tok-1": "num_experts_per_tok 1 is not supported",
    "cohere2-head_dim-48": "head_dim 48 is not supported",
    "starcoder2-head_dim-48": "has shape",
    "phi3-original_max_position_embeddings-512": "exceeds original_max_position_embeddings",
}
"""Why a variant is refused, in the words of the message."""


def _all() -> Iterator[tuple[Variant, bool]]:
    """Yield all variants, and whether `make test` has time for it.

    It tries each value of each entry once for each family, and of the kinds of rotary embeddings a third, in turn.
    """
    seen, kinds = set[tuple[str, str, str]](), list(ROPES)
    for number, name in enumerate(CONFIGS):
        architecture = config_of(name)["architectures"][0]
        for variant in variants_of(name):
            one = (architecture, variant.key, variant.label)
            is_turn = variant.label not in kinds or (number + kinds.index(variant.label)) % 3 == 0
            yield variant, is_turn and one not in seen
            seen.add(one)


VARIANTS = list(_all())
