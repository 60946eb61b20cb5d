"""Small random models that read images, with their processors' files, and images for them."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    SiglipVisionConfig,
)

from quipu.kernels.step_types import PromptImage
from tests.kernels.family_configs import VOCAB_SIZE

FAMILIES = ("llava", "gemma3")
SIDE, PLACEHOLDER = 12, 300
NUM_TOKENS = 36
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
}
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_NUMBERS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": STD,
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "LlavaImageProcessor",
        "size": {"shortest_edge": SIDE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": SIDE, "width": SIDE},
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "resample": 2,
        "do_pan_and_scan": None,
    },
}


def _config(family: str, vocab_size: int, placeholder: int, window: int) -> PreTrainedConfig:
    if family == "llava":
        text = LlamaConfig(**_TEXT, vocab_size=vocab_size)
        vision = CLIPVisionConfig(**_VISION, patch_size=2)
        return LlavaConfig(vision_config=vision, text_config=text, image_token_index=placeholder)
    return Gemma3Config(
        # each token is made of four patches
        vision_config=SiglipVisionConfig(**_VISION, patch_size=1, vision_use_head=False),
        text_config=Gemma3TextConfig(
            **{**_TEXT, "num_hidden_layers": 3},
            head_dim=16,
            query_pre_attn_scalar=16,
            vocab_size=vocab_size,
            sliding_window=window,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        mm_tokens_per_image=NUM_TOKENS,
        image_token_index=placeholder,
        boi_token_index=placeholder + 1,
        eoi_token_index=placeholder + 2,
    )


def make_seeing_model(
    folder: Path, vocab_size: int = VOCAB_SIZE, placeholder: int = PLACEHOLDER, family: str = "llava", window: int = 64
) -> Path:
    """Make a checkpoint whose logits depend on what it sees. `window`: of some layers of Gemma 3."""
    torch.manual_seed(5)
    config = _config(family, vocab_size, placeholder, window)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**_NUMBERS, **_PROCESSORS[family]}))
    return folder


def draw_image(seed: int, start: int = 0) -> PromptImage:
    """Draw an image in which each pixel has a color of its own."""
    pixels = random.Random(seed).randbytes(SIDE * SIDE * 3)
    return PromptImage(hashlib.sha256(pixels).digest(), pixels, SIDE, SIDE, NUM_TOKENS, start)


def pixel_values(image: PromptImage) -> torch.Tensor:
    """Return what the model's processor makes of an image."""
    values = torch.tensor(list(image.pixels)).reshape(1, SIDE, SIDE, 3).permute(0, 3, 1, 2) / 255
    return (values - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def told_of_images(family: str, tokens: list[int], placeholder: int = PLACEHOLDER) -> dict[str, torch.Tensor]:
    """Return what transformers is told of a prompt's tokens beside their ids."""
    return {"token_type_ids": (torch.tensor([tokens]) == placeholder).long()} if family == "gemma3" else {}
