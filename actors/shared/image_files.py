"""How a model wants the images of its prompts, as its checkpoint's files say.

`wiring.py` reads it at start. What must always hold: an entry that is not understood is refused by name, never ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..messages.images import ImageFormat
from .checkpoint import CheckpointError, read_json

ARCHITECTURE = "LlavaForConditionalGeneration"
"""The only architecture whose images are read."""
_FILES = ("preprocessor_config.json", "processor_config.json")
_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Features beside those of patches, by the type of `vision_config`."""
_RESAMPLE = range(6)
_BICUBIC = 3


def read_image_format(folder: Path) -> ImageFormat | None:
    """Return how images are to be made; None for a model that reads none. Raises CheckpointError."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    if config.get("architectures") != [ARCHITECTURE]:
        return None
    vision = config.get("vision_config") or {}
    kind = vision.get("model_type")
    if kind not in _CLASS_TOKENS:
        raise CheckpointError(f"config.json: vision_config.model_type {str(kind)[:80]!r} is not supported")
    side, patch = (
        _positive(vision, name, f"config.json: vision_config.{name}") for name in ("image_size", "patch_size")
    )
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise CheckpointError(f"config.json: vision_feature_select_strategy {str(strategy)[:80]!r} is not supported")
    num_tokens = (side // patch) ** 2 + _CLASS_TOKENS[kind] - (strategy == "default")
    placeholder = config.get("image_token_id", config.get("image_token_index"))
    if type(placeholder) is not int or placeholder < 0:
        raise CheckpointError("config.json: image_token_index must be the id of a token")
    return ImageFormat(placeholder, num_tokens, *_sizes(_read_processor(folder), side))


def _read_processor(folder: Path) -> dict[str, Any]:
    for name in _FILES:
        if (folder / name).exists():
            entries = read_json(folder / name)
            found = entries.get("image_processor", entries if name == _FILES[0] else None)
            if isinstance(found, dict):
                return found
    raise CheckpointError(f"the model reads images, but its checkpoint has no {_FILES[0]}")


def _sizes(entries: dict[str, Any], side: int) -> tuple[int, int, int, int]:
    """Return the shorter side, height, width and filter."""
    file = _FILES[0]
    if entries.get("do_pad") or not entries.get("do_resize", True) or not entries.get("do_center_crop", True):
        raise CheckpointError(f"{file}: only do_resize and do_center_crop are supported, without do_pad")
    size, crop = entries.get("size"), entries.get("crop_size")
    shorter = size.get("shortest_edge") if isinstance(size, dict) else size
    height, width = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (crop, crop)
    if type(shorter) is not int or shorter < side or height != side or width != side:
        raise CheckpointError(
            f"{file}: crop_size must be the {side} pixels of vision_config.image_size, and size.shortest_edge no less"
        )
    resample = entries.get("resample", _BICUBIC)
    if resample not in _RESAMPLE:
        raise CheckpointError(f"{file}: resample {str(resample)[:80]!r} is not supported")
    return shorter, side, side, int(resample)


def _positive(entries: dict[str, Any], name: str, shown: str) -> int:
    value = entries.get(name)
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{shown} must be a positive integer")
    return value
