"""What a checkpoint says about its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaImageProcessorPil

from quipu.actors.messages.images import ImageFormat, ImageTexts
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.shared.image_files import check_room, knows_images, read_image_format

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
    return read_image_format(folder, "transformers")


def test_llava(tmp_path: Path) -> None:
    """LLaVA 1.5's images have 576 tokens; with the class token one more; a SigLIP tower has none. Others have none."""
    assert read(tmp_path, CONFIG) == ImageFormat(32000, 576, 336, 336, 336, 3)
    full = read(tmp_path, {**CONFIG, "vision_feature_select_strategy": "full"})
    siglip = {**CONFIG["vision_config"], "model_type": "siglip_vision_model"}
    other = read(tmp_path, {**CONFIG, "vision_config": siglip, "vision_feature_select_strategy": "full"})
    assert full is not None and other is not None
    assert (full.num_tokens, other.num_tokens) == (577, 576)
    assert read(tmp_path, {"architectures": ["LlamaForCausalLM"]}, None) is None


def test_siglip(tmp_path: Path) -> None:
    """A SigLIP tower's own processor scales both sides and cuts nothing out, unless it is told to."""
    vision = {**CONFIG["vision_config"], "model_type": "siglip_vision_model"}
    config = {**CONFIG, "vision_config": vision, "vision_feature_select_strategy": "full"}
    processor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 336, "width": 336}}
    scaled = ImageFormat(32000, 576, None, 336, 336, 3)
    assert read(tmp_path, config, processor) == scaled
    crop = {"do_center_crop": True, "crop_size": {"height": 336, "width": 336}}
    assert read(tmp_path, config, {**processor, **crop}) == scaled
    for changes in (
        {"do_center_crop": True},
        {"size": {"shortest_edge": 336}},
        {"size": {"height": 336, "width": 300}},
    ):
        with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: (crop_)?size"):
            read(tmp_path, config, {**processor, **changes})


def test_processor_within_another(tmp_path: Path) -> None:
    """What a whole processor's file says of images precedes what is left in a file of their own, as in transformers."""
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {**PROCESSOR, "resample": 2}}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read(tmp_path, CONFIG, None) == read(tmp_path, CONFIG) == ImageFormat(32000, 576, 336, 336, 336, 2)
    assert LlavaImageProcessorPil.from_pretrained(tmp_path).resample == 2
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": None}))
    assert read(tmp_path, CONFIG) == ImageFormat(32000, 576, 336, 336, 336, 3)


@pytest.mark.parametrize(
    ("config", "processor", "named"),
    [
        ({"vision_config": {"model_type": "pixtral"}}, PROCESSOR, "model_type 'pixtral'"),
        ({"vision_config": "clip_vision_model"}, PROCESSOR, "vision_config.model_type"),
        ({"vision_config": {"model_type": ["clip_vision_model"]}}, PROCESSOR, "vision_config.model_type"),
        ({"vision_config": {**CONFIG["vision_config"], "patch_size": 337}}, PROCESSOR, "patch_size 337"),
        ({}, {**PROCESSOR, "do_flip_channel_order": True}, "do_flip_channel_order"),
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


GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
}
SCALED: dict[str, Any] = {"size": {"height": 896, "width": 896}, "resample": 2, "do_pan_and_scan": None}
NAMES = {"boi_token": "<b>", "image_token": "<i>", "eoi_token": "<e>"}


def read_gemma3(folder: Path, names: dict[str, str] = NAMES, **changes: Any) -> ImageFormat | None:
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": changes.pop("told", 256)}))
    processor = {name: changes.pop(name) for name in list(changes) if name not in GEMMA3}
    return read(folder, {**GEMMA3, **changes}, {**SCALED, **processor})


def test_gemma3(tmp_path: Path) -> None:
    """Gemma 3's images are scaled to a square and take 256 tokens, between two others and empty lines; no step may
    divide them."""
    texts = ImageTexts("<b>", "\n\n<b><i><e>\n\n", ("<i>", "<e>"))
    wanted = read_gemma3(tmp_path)
    assert wanted == ImageFormat(262144, 256, None, 896, 896, 2, texts, is_whole=True)
    for executor in ("auto", "cpu", "triton", "vllm", "reference"):
        assert read_image_format(tmp_path, executor) is None
    assert knows_images(tmp_path)
    check_room(wanted, 256 + 8, 8)
    with pytest.raises(CheckpointError, match=r"--max-num-batched-tokens 263: .* choose at least 264"):
        check_room(wanted, 256 + 7, 8)
    check_room(read(tmp_path, CONFIG), 1, 8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mm_tokens_per_image": 300}, "mm_tokens_per_image 300"),
        ({"mm_tokens_per_image": None}, "mm_tokens_per_image"),
        ({"told": 255}, "image_seq_length '255'"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_resize": False}, "do_resize"),
        ({"size": {"height": 448, "width": 896}}, "size 896 x 896"),
        ({"resample": 9}, "resample"),
        ({"names": {"boi_token": "<b>", "image_token": "<i>"}}, "eoi_token"),
        ({"vision_config": {**GEMMA3["vision_config"], "model_type": "clip_vision_model"}}, "model_type"),
    ],
)
def test_gemma3_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """So are entries of Gemma 3's files."""
    with pytest.raises(CheckpointError, match=named):
        read_gemma3(tmp_path, **changes)
