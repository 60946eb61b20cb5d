"""Checkpoints of models that read images, too: their decoders of text are served as if they had been saved alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quipu.actors.shared.checkpoint import read_info
from quipu.kernels.models.config_parts import Temperature
from quipu.kernels.models.families import find_family
from quipu.kernels.models.rope_config import YarnScaling
from quipu.kernels.models.text_part import WITH_TOWERS, Decoder, text_part
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

ROW = {"token_ids": prompt(40, seed=1), "position": 0, "blocks": scattered_blocks(3, seed=1)}
CASES = {
    "gemma4": ("Gemma4ForConditionalGeneration", "model.language_model.", "lm_head."),
    "gemma4-plain": ("Gemma4ForConditionalGeneration", "model.language_model.", "lm_head."),
    "gemma3": ("Gemma3ForConditionalGeneration", "language_model.model.", "language_model.lm_head."),
    "gemma3n": ("Gemma3nForConditionalGeneration", "model.language_model.", "lm_head."),
    "llama4": ("Llama4ForConditionalGeneration", "language_model.model.", "language_model.lm_head."),
    "mistral": ("Mistral3ForConditionalGeneration", "language_model.model.", "language_model.lm_head."),
}
"""An architecture, and how it calls what is in the model and in its head."""
TOWERS = (
    *("model.vision_tower.encoder.x", "model.audio_tower.y", "model.embed_vision.z", "model.embed_audio.z"),
    *("vision_tower.w", "multi_modal_projector.v", "vision_model.u"),
)


@pytest.mark.parametrize("name", CASES)
def test_decoder_alone(tmp_path: Path, checkpoints: dict[str, Path], name: str) -> None:
    """Compute the same logits, reading nothing of towers; name a tensor that belongs to neither."""
    architecture, model, head = CASES[name]
    folder = Path(shutil.copytree(checkpoints[name], tmp_path / name))
    text = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": [architecture],
        "dtype": "float32",
        "eos_token_id": [5],
        "text_config": {**text, "architectures": None, "dtype": "bfloat16", "eos_token_id": 6},
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    whole = {
        key.replace("model.", model, 1) if key.startswith("model.") else key.replace("lm_head.", head, 1): tensor
        for key, tensor in tensors.items()
    }
    whole |= {f"{one}.weight": torch.ones(3) for one in TOWERS}
    save_file(whole, folder / "model.safetensors")
    expected = make_backend(checkpoints[name]).logits(make_batch(ROW), [39])
    assert torch.equal(make_backend(folder).logits(make_batch(ROW), [39]), expected)
    info = read_info(folder)
    assert (info.max_model_len, info.eos_token_ids[:2], info.dtype) == (2048, (5, 6), "float32")
    save_file({**whole, "model.other.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"does not use: model\.other\.weight"):
        make_backend(folder)


def test_head_is_tied_by_the_whole_model(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """A head is the embedding if the whole model says so, as in transformers, whatever its decoder says."""
    folders = [Path(shutil.copytree(checkpoints["mistral"], tmp_path / name)) for name in ("alone", "with-towers")]
    text = json.loads((folders[0] / "config.json").read_text())
    assert not text["tie_word_embeddings"]
    tied = {"tie_word_embeddings": True}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, **tied}
    for folder, config in zip(folders, ({**text, **tied}, whole), strict=True):
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
    alone, with_towers = (make_backend(folder).logits(make_batch(ROW), [39]) for folder in folders)
    assert torch.equal(alone, with_towers)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({}, "text_config is None, must be an object"),
        ({"text_config": {"vocab_size": "many"}}, "vocab_size is 'many', must be an integer"),
        ({"text_config": {"model_type": "gemma3_text"}}, "text_config.model_type 'gemma3_text' is not supported"),
    ],
)
def test_configuration_without_text(entries: dict[str, Any], problem: str) -> None:
    """Name what is missing or wrong of a model with towers."""
    config = {"architectures": ["Gemma4ForConditionalGeneration"], **entries}
    with pytest.raises(ValueError, match=problem):
        find_family(config).parse(config)


@pytest.mark.parametrize("decoder", [one for several in WITH_TOWERS.values() for one in several])
def test_defaults(decoder: Decoder) -> None:
    """What published configurations leave out is what transformers takes for it."""
    theirs = AutoConfig.for_model(decoder.model_type)
    assert {key: getattr(theirs, key) for key in decoder.defaults} == decoder.defaults


def test_published_gemma3() -> None:
    """The published configuration of Gemma 3 4B says as little as this."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106], "model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }  # fmt: skip
    parsed = find_family(config).parse(config)
    assert (parsed.num_heads, parsed.num_kv_heads, parsed.head_dim, parsed.vocab_size) == (8, 4, 256, 262208)
    assert (parsed.windows[4:7], parsed.tie_word_embeddings, parsed.qkv_bias) == ((1024, None, 1024), True, False)
    assert text_part(config)["torch_dtype"] == "bfloat16"


def test_published_gemma4() -> None:
    """Entries of the towers' tokens in the published configuration of Gemma 4 31B are none of the decoder's."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    text = {
        "attention_k_eq_v": True, "enable_moe_block": False, "expert_intermediate_size": None,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504, "layer_types": kinds * 10, "max_position_embeddings": 262144,
        "model_type": "gemma4_text", "moe_intermediate_size": None, "num_attention_heads": 32, "num_experts": None,
        "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06, "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None,
        "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
        "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883,
        "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
        "initializer_range": 0.02, "model_type": "gemma4", "text_config": text, "tie_word_embeddings": True,
        "transformers_version": "5.7.0", "video_token_id": 258884, "vision_config": {"model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280,
    }  # fmt: skip
    assert find_family(config).parse(config).num_layers == 60


def test_published_mistral_small() -> None:
    """Entries of the projector in the published configuration of Mistral Small 3.1 are none of the decoder's."""
    text = {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
    }  # fmt: skip
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "text_config": text, "transformers_version": "4.57.1",
        "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1,
    }  # fmt: skip
    assert find_family(config).parse(config).num_layers == 40


def test_published_ministral_3() -> None:
    """The published configuration of Ministral 3 8B names Mistral's architecture, but another decoder."""
    rope = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
        "rope_type": "yarn", "type": "yarn",
    }  # fmt: skip
    text = {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
        "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_parameters": rope, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
    }  # fmt: skip
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "text_config": text, "transformers_version": "5.0.0.dev0",
        "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1,
    }  # fmt: skip
    parsed = find_family(config).parse(config)
    assert parsed.temperature == Temperature(16384, 0.1, first=0)
    assert isinstance(parsed.rope.scaling, YarnScaling) and parsed.rope.scaling.attention_factor == 1.0
    assert parsed.windows == (None,) * 34
