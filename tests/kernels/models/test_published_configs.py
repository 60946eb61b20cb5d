"""Published configurations are accepted as they are and interpreted correctly.

Entries are as on the Hugging Face Hub, except those of tokens and training. Rotary tables are compared with
transformers' own.
"""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quipu.kernels.models.config import DecoderConfig
from quipu.kernels.models.families import find_family
from quipu.kernels.models.rope import make_rope_table
from quipu.kernels.models.rope_config import Rope, ShortFactors


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
}  # fmt: skip


def parse(name: str) -> DecoderConfig:
    return find_family(PUBLISHED[name]).parse(PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_accepted_without_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Accept each of them, with no unknown entry."""
    with caplog.at_level(logging.WARNING):
        parse(name)
    assert not caplog.records


def test_parsed_values() -> None:
    """Parse windows, scales and rotary widths as in the models' reports and in transformers."""
    assert set(parse("Mistral-7B-v0.1").windows) == {4096}
    assert set(parse("Mistral-Nemo").windows) == {None} == set(parse("Qwen2.5-7B-Instruct with yarn").windows)
    assert parse("gemma-2-27b").windows[:3] == (4096, None, 4096)
    assert parse("gemma-2-27b").attention_scale == 1 / 12
    assert [index for index, window in enumerate(parse("gemma-3-1b").windows) if window is None] == [5, 11, 17, 23]
    assert parse("gemma-3-1b").tie_word_embeddings
    assert (parse("Phi-4-mini").head_dim, parse("Phi-4-mini").rope.width) == (128, 96)
    assert parse("phi-4").rope == Rope(theta=250_000.0, width=128, scaling=None)
    moe = parse("Qwen3-30B-A3B").moe
    assert moe is not None and not moe.dense_layers and moe.normalise


@pytest.mark.parametrize("name", PUBLISHED)
def test_rope_tables_match_transformers(name: str) -> None:
    """Match the cosines and sines of every kind of layer, at small and large positions, attention factor included."""
    # transformers keeps and changes the dictionary
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in PUBLISHED[name].items()}
    theirs = AutoConfig.for_model(data.pop("model_type"), **data)
    config = parse(name)
    for rope, layer_type in ((config.rope, "full_attention"), (config.local_rope, "sliding_attention")):
        frequency_R, factor = _frequencies(theirs, config, rope, layer_type)
        table = make_rope_table(rope, 4096)
        positions = torch.tensor([0, 1, 2, 63, 700, 4095])
        angle_PR = torch.outer(positions.float(), frequency_R)
        cos_PR, sin_PR = table.at(positions)
        # in float32 an angle in the thousands is accurate to a few ten-thousandths
        torch.testing.assert_close(cos_PR, angle_PR.cos() * factor, rtol=0, atol=2e-3)
        torch.testing.assert_close(sin_PR, angle_PR.sin() * factor, rtol=0, atol=2e-3)
        torch.testing.assert_close(cos_PR[:3], (angle_PR.cos() * factor)[:3], rtol=0, atol=1e-6)


def _frequencies(
    theirs: PreTrainedConfig, config: DecoderConfig, rope: Rope, layer_type: str
) -> tuple[torch.Tensor, float]:
    nested = layer_type in theirs.rope_parameters
    entries = theirs.rope_parameters[layer_type] if nested else theirs.rope_parameters
    if entries["rope_type"] == "default":
        assert attrs.evolve(rope, scaling=None) == rope
        exponent_R = torch.arange(0, rope.width, 2).float() / rope.width
        return 1.0 / entries["rope_theta"] ** exponent_R, 1.0
    if isinstance(rope.scaling, ShortFactors):
        assert rope.scaling.original_max_position_embeddings == 4096
    frequency_R, factor = ROPE_INIT_FUNCTIONS[entries["rope_type"]](theirs, layer_type=layer_type if nested else None)
    return frequency_R, float(factor)
