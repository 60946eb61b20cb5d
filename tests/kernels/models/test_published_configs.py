"""Published configurations are accepted as they are and interpreted correctly.

They are in `published_configs.py`. Rotary tables are compared with transformers' own.
"""

from __future__ import annotations

import logging
import math

import attrs
import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quipu.kernels.models.config import DecoderConfig
from quipu.kernels.models.config_parts import ExpertChoice, HeadShape, Llama4Config, Temperature
from quipu.kernels.models.families import find_family
from quipu.kernels.models.rope import make_rope_table
from quipu.kernels.models.rope_config import Rope, ShortFactors
from quipu.kernels.ops import SwigluClamp
from tests.kernels.models.published_configs import PUBLISHED


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
    moe = parse("Qwen1.5-MoE-A2.7B").moe
    assert moe is not None and (moe.intermediate_size, moe.shared_intermediate_size) == (1408, 5632)
    moe = parse("OLMoE-1B-7B").moe
    assert moe is not None and (moe.intermediate_size, moe.shared_intermediate_size) == (1024, None)
    assert set(parse("Qwen1.5-MoE-A2.7B").windows) == {None}
    assert parse("OLMo-3-7B").windows[:4] == (4096, 4096, 4096, None)
    assert parse("OLMo-3-7B").local_rope == Rope(theta=500_000.0, width=128, scaling=None)
    assert parse("EXAONE-4.0-32B").unrotated == set(range(3, 64, 4)) and not parse("EXAONE-4.0-1.2B").unrotated
    assert parse("SmolLM3-3B").unrotated == set(range(3, 36, 4)) and parse("SmolLM3-3B").tie_word_embeddings
    assert (parse("GLM-4-9B-0414").rope.width, parse("GLM-4-9B-0414").rope.is_interleaved) == (64, True)
    granite = parse("granite-3.1-2b")
    assert (granite.attention_scale, granite.logits_divisor) == (1 / 64, 8.0)
    assert granite.embed_scale == pytest.approx(54.545454)
    assert granite.rms_norm_eps == pytest.approx(1e-5 / 0.22**2)
    gpt_oss = parse("gpt-oss-120b")
    assert (gpt_oss.windows[:2], gpt_oss.has_sinks, gpt_oss.o_bias) == ((128, None), True, True)
    assert gpt_oss.moe is not None and (gpt_oss.moe.num_experts, gpt_oss.moe.num_chosen) == (128, 4)
    assert gpt_oss.moe.clamp == SwigluClamp(alpha=1.702, limit=7.0)
    lite, v3 = parse("DeepSeek-V2-Lite"), parse("DeepSeek-V3")
    assert (lite.num_kv_heads, lite.head_dim, v3.head_dim, v3.num_ignored_layers) == (1, 576, 576, 1)
    assert lite.attention_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert lite.latent is not None and lite.latent.query_width is None and lite.moe is not None and v3.moe is not None
    assert (lite.moe.shared_intermediate_size, sorted(lite.moe.dense_layers)) == (2816, [0])
    assert (v3.moe.shared_intermediate_size, sorted(v3.moe.dense_layers)) == (2048, [0, 1, 2])
    assert v3.moe.choice == ExpertChoice(is_sigmoid=True, num_groups=8, num_chosen_groups=4, factor=2.5)
    command = parse("c4ai-command-r7b-12-2024")
    assert command.windows[:4] == (4096, 4096, 4096, None) and sorted(command.unrotated) == list(range(3, 32, 4))
    assert (command.logits_divisor, command.tie_word_embeddings, command.is_parallel) == (4.0, True, True)
    assert (parse("stablelm-2-1_6b").rope.width, parse("stablelm-2-1_6b").is_parallel) == (16, False)
    assert (parse("starcoder2-3b").tie_word_embeddings, parse("starcoder2-3b").windows[0]) == (True, 4096)
    moe = parse("granite-3.1-3b-a800m").moe
    assert moe is not None and (moe.intermediate_size, moe.num_experts, moe.normalise) == (512, 40, True)
    micro = parse("granite-4.0-micro")
    assert (micro.moe, micro.intermediate_size, len(micro.unrotated), micro.mlp_name) == (None, 8192, 0, "shared_mlp")
    phimoe = parse("Phi-3.5-MoE")
    assert phimoe.moe is not None and phimoe.moe.choice == ExpertChoice(mixer_range=0.02)
    assert (phimoe.head_bias, phimoe.o_bias, phimoe.norms_have_biases, phimoe.windows[0]) == (True, True, True, 131072)
    e4b = parse("gemma-3n-E4B")
    assert e4b.gemma3n is not None and e4b.heads_of_layers == (HeadShape(2, 256),) * 20
    assert (e4b.cached[18:], e4b.windows[33:]) == ((18, 19, *((18,) * 4 + (19,)) * 3), (512, None))
    assert e4b.gemma3n.deviations[9] == pytest.approx(1.6448536) and e4b.gemma3n.deviations[10] is None
    assert e4b.attention_scale == 1.0
    assert (e4b.rope.theta, e4b.local_rope.theta, e4b.tie_word_embeddings) == (1e6, 1e4, True)
    e2b, a4b = parse("gemma-4-E2B"), parse("gemma-4-26B-A4B")
    assert e2b.gemma4 is not None and a4b.gemma4 is not None and a4b.moe is not None
    assert e2b.heads_of_layers == ((HeadShape(1, 256),) * 4 + (HeadShape(1, 512),)) * 3
    assert (e2b.cached[14:20], e2b.gemma4.mlp_widths[14:16], e2b.windows[33]) == (
        (14, 13, 13, 13, 13, 14),
        (6144, 12288),
        512,
    )
    assert (a4b.heads_of_layers[:6:5], a4b.gemma4.inputs) == ((HeadShape(8, 256), HeadShape(2, 512)), None)
    assert (a4b.moe.num_experts, a4b.moe.num_chosen, a4b.attention_scale, a4b.embed_scale) == (128, 8, 1.0, 2816**0.5)
    scout, maverick = parse("Llama-4-Scout-17B-16E"), parse("Llama-4-Maverick-17B-128E")
    assert scout.windows[:4] == maverick.windows[:4] == (8192, 8192, 8192, None)
    assert scout.unrotated == maverick.unrotated == set(range(3, 48, 4))
    assert (scout.llama4, maverick.llama4) == (Llama4Config(norms_heads=True), Llama4Config(norms_heads=False))
    assert scout.temperature == maverick.temperature == Temperature(8192, 0.1, first=1)
    assert scout.moe is not None and not scout.moe.dense_layers
    assert maverick.moe is not None and maverick.moe.dense_layers == set(range(0, 48, 2))
    assert (maverick.moe.intermediate_size, maverick.intermediate_size, scout.rope.is_interleaved) == (
        8192,
        16384,
        True,
    )
    air = parse("GLM-4.5-Air")
    assert (air.rope.width, air.rope.is_interleaved, air.norms_heads, air.o_bias) == (64, False, False, False)
    assert air.moe is not None and air.moe.choice == ExpertChoice(is_sigmoid=True)
    assert (parse("Seed-OSS-36B").qkv_bias, parse("Seed-OSS-36B").o_bias) == (True, False)


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
    return frequency_R, float(entries.get("short_mscale", factor))
