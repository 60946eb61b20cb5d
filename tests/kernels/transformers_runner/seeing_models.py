"""A small random model that reads images, with its processor's file, and images for it."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import attrs
import torch
from transformers import AutoModelForImageTextToText, CLIPVisionConfig, LlamaConfig, LlavaConfig

from quipu.kernels.step_types import PromptImage
from tests.kernels.kernel_checkpoints import VOCAB_SIZE

SIDE, PATCH, PLACEHOLDER = 12, 2, 300
NUM_TOKENS = (SIDE // PATCH) ** 2
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


def make_seeing_model(folder: Path, vocab_size: int = VOCAB_SIZE, placeholder: int = PLACEHOLDER) -> Path:
    """Make a checkpoint of LLaVA's shape whose logits depend on what it sees."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=512,
    )
    torch.manual_seed(5)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=placeholder)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "LlavaImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": SIDE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def draw_image(seed: int, start: int = 0) -> PromptImage:
    """Draw an image in which each pixel has a color of its own."""
    pixels = random.Random(seed).randbytes(SIDE * SIDE * 3)
    return PromptImage(hashlib.sha256(pixels).digest(), pixels, SIDE, SIDE, NUM_TOKENS, start)


def pixel_values(image: PromptImage) -> torch.Tensor:
    """Return what the model's processor makes of an image."""
    values = torch.tensor(list(image.pixels)).reshape(1, SIDE, SIDE, 3).permute(0, 3, 1, 2) / 255
    return (values - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def moved(image: PromptImage, start: int) -> PromptImage:
    """Return an image that begins elsewhere in its prompt."""
    return attrs.evolve(image, start=start)
