"""What entries of a config.json mean: defaults of those that are absent, older spellings, and derived numbers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import attrs
import pytest

from quipu.kernels.models.config import DecoderConfig, check_length
from quipu.kernels.models.config_parts import Gemma3nConfig, HeadShape, InputConfig, Temperature
from quipu.kernels.models.rope_config import ProportionalScaling, Rope, YarnScaling
from quipu.kernels.ops import SwigluClamp
from tests.kernels.models.parsed_configs import YARN, parse

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
