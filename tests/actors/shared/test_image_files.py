"""What a checkpoint says about its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.messages.images import ImageFormat
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.shared.image_files import read_image_format

CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}
PROCESSOR: dict[str, Any] = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, "resample": 3}


def read(folder: Path, config: dict[str, Any], processor: dict[str, Any] | None = PROCESSOR) -> ImageFormat | None:
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return read_image_format(folder)


def test_llava(tmp_path: Path) -> None:
    """LLaVA 1.5's images have 576 tokens; with the class token one more; a SigLIP tower has none. Others have none."""
    assert read(tmp_path, CONFIG) == ImageFormat(32000, 576, 336, 336, 336, 3)
    full = read(tmp_path, {**CONFIG, "vision_feature_select_strategy": "full"})
    siglip = {**CONFIG["vision_config"], "model_type": "siglip_vision_model"}
    other = read(tmp_path, {**CONFIG, "vision_config": siglip, "vision_feature_select_strategy": "full"})
    assert full is not None and other is not None
    assert (full.num_tokens, other.num_tokens) == (577, 576)
    assert read(tmp_path, {"architectures": ["LlamaForCausalLM"]}, None) is None


@pytest.mark.parametrize(
    ("config", "processor", "named"),
    [
        ({"vision_config": {"model_type": "pixtral"}}, PROCESSOR, "model_type 'pixtral'"),
        ({"vision_config": {"model_type": "clip_vision_model", "image_size": 336}}, PROCESSOR, "patch_size"),
        ({"vision_feature_select_strategy": "half"}, PROCESSOR, "vision_feature_select_strategy"),
        ({"image_token_index": "<image>"}, PROCESSOR, "image_token_index"),
        ({}, {**PROCESSOR, "do_pad": True}, "do_pad"),
        ({}, {**PROCESSOR, "crop_size": 224}, "crop_size"),
        ({}, {**PROCESSOR, "resample": 9}, "resample"),
        ({}, None, "preprocessor_config.json"),
    ],
)
def test_refused(tmp_path: Path, config: dict[str, Any], processor: dict[str, Any] | None, named: str) -> None:
    """An entry that is not understood is refused by name."""
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path, {**CONFIG, **config}, processor)
