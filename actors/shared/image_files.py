"""How a model wants the images of its prompts, as its checkpoint's files say.

The web process reads it at start, and each engine. What must always hold: an entry that is not understood is refused by
name, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import attrs

from ..messages.images import ImageFormat, ImageTexts
from .added_tokens import CONFIG, read_special_tokens
from .checkpoint import CheckpointError, read_json

EYES = frozenset({"transformers", "fake"})
"""Executors that read images; the fake one does not look at them."""
_PROCESSOR, _IMAGE_PROCESSOR = "processor_config.json", "preprocessor_config.json"
_STEPS = frozenset(
    f"do_{step}" for step in ("resize", "center_crop", "pad", "rescale", "normalize", "convert_rgb", "pan_and_scan")
)
"""What the readers here, and the executor's, know of what is done to an image."""
_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Features beside those of patches, by the type of `vision_config`."""
_RESAMPLE = range(6)
_BILINEAR, _BICUBIC = 2, 3


def read_image_format(folder: Path, executor: str) -> ImageFormat | None:
    """Return how images are to be made; None for an executor or a model that reads none. Raises CheckpointError."""
    read = _reader_for(folder) if executor in EYES else None
    return None if read is None else read(folder, read_json(folder / "config.json"))


def knows_images(folder: Path) -> bool:
    """Return whether images of this architecture are read, by executors that read any."""
    return _reader_for(folder) is not None


def check_room(wanted: ImageFormat | None, max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raises CheckpointError if a step might have no room for an image of which it has to compute all tokens."""
    if wanted is None or not wanted.is_whole or wanted.num_tokens + max_num_seqs <= max_num_batched_tokens:
        return
    raise CheckpointError(
        f"--max-num-batched-tokens {max_num_batched_tokens}: a step needs room for the {wanted.num_tokens} tokens of "
        f"an image, which attend to one another, beside --max-num-seqs {max_num_seqs} sequences: choose at least "
        f"{wanted.num_tokens + max_num_seqs}, or fewer sequences"
    )


def _reader_for(folder: Path) -> Callable[[Path, dict[str, Any]], ImageFormat] | None:
    path = folder / "config.json"
    listed = read_json(path).get("architectures") if path.exists() else None
    return _READERS.get(str(listed[0])) if isinstance(listed, list) and len(listed) == 1 else None


# ---------------------------------------------------------------- LLaVA


def _read_llava(folder: Path, config: dict[str, Any]) -> ImageFormat:
    tower = _Tower.read(config, _CLASS_TOKENS)
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise CheckpointError(f"config.json: vision_feature_select_strategy {str(strategy)[:80]!r} is not supported")
    num_tokens = tower.num_patches**2 + _CLASS_TOKENS[tower.kind] - (strategy == "default")
    placeholder = _placeholder(config)
    return ImageFormat(placeholder, num_tokens, *_llava_sizes(_read_processor(folder), tower.side))


def _llava_sizes(entries: dict[str, Any], side: int) -> tuple[int | None, int, int, int]:
    """Return the shorter side, height, width and filter."""
    # SigLIP's processor, with which some towers are published, cuts nothing out unless it is told to.
    does_crop = entries.get("do_center_crop", not str(entries.get("image_processor_type")).startswith("Siglip"))
    if entries.get("do_pad") or not entries.get("do_resize", True):
        raise CheckpointError(f"{_IMAGE_PROCESSOR}: do_resize must be true, and do_pad is not supported")
    size, crop = entries.get("size"), entries.get("crop_size")
    is_scaled_whole = size == {"height": side, "width": side}
    shorter = size.get("shortest_edge") if isinstance(size, dict) else size
    if not is_scaled_whole and (type(shorter) is not int or shorter < side or not does_crop):
        raise CheckpointError(
            f"{_IMAGE_PROCESSOR}: size must be the {side} x {side} pixels of vision_config.image_size, or its "
            f"shortest_edge no less than {side}, with do_center_crop"
        )
    height, width = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (crop, crop)
    if does_crop and (height != side or width != side):
        raise CheckpointError(f"{_IMAGE_PROCESSOR}: crop_size must be the {side} pixels of vision_config.image_size")
    return None if is_scaled_whole else shorter, side, side, _filter(entries, _BICUBIC)


# ---------------------------------------------------------------- Gemma 3


def _read_gemma3(folder: Path, config: dict[str, Any]) -> ImageFormat:
    tower = _Tower.read(config, ("siglip_vision_model",))
    name = "mm_tokens_per_image"
    num_tokens = _positive(config, name, f"config.json: {name}")
    pool = tower.num_patches // int(num_tokens**0.5)
    if pool == 0 or (tower.num_patches // pool) ** 2 != num_tokens:
        raise CheckpointError(
            f"config.json: mm_tokens_per_image {num_tokens} does not divide {tower.num_patches} x {tower.num_patches} "
            f"patches into squares"
        )
    path = folder / _PROCESSOR
    told = read_json(path).get("image_seq_length", num_tokens) if path.exists() else num_tokens
    if told != num_tokens:
        raise CheckpointError(f"{_PROCESSOR}: image_seq_length {str(told)[:80]!r} is not mm_tokens_per_image")
    entries = _read_processor(folder)
    for name in ("do_pan_and_scan", "do_pad", "do_center_crop"):
        if entries.get(name):
            raise CheckpointError(f"{_IMAGE_PROCESSOR}: {name} is not supported")
    if not entries.get("do_resize", True) or entries.get("size") != {"height": tower.side, "width": tower.side}:
        raise CheckpointError(
            f"{_IMAGE_PROCESSOR}: do_resize must be true, and size {tower.side} x {tower.side} pixels"
        )
    return ImageFormat(
        placeholder=_placeholder(config),
        num_tokens=num_tokens,
        shorter_side=None,
        height=tower.side,
        width=tower.side,
        resample=_filter(entries, _BILINEAR),
        texts=_read_gemma3_texts(folder),
        is_whole=True,
    )


def _read_gemma3_texts(folder: Path) -> ImageTexts:
    texts = read_special_tokens(folder).texts
    names = "boi_token", "image_token", "eoi_token"
    if missing := [name for name in names if not texts.get(name)]:
        raise CheckpointError(f"{CONFIG}: {missing[0]} is needed for images")
    begin, part, end = (texts[name] for name in names)
    # as transformers' Gemma3Processor writes it, with one placeholder for all
    return ImageTexts(begin, f"\n\n{begin}{part}{end}\n\n", (part, end))


# ---------------------------------------------------------------- parts of both


@attrs.frozen
class _Tower:
    kind: str
    """Its type in `vision_config`."""
    side: int
    """Pixels."""
    num_patches: int
    """Along a side."""

    @classmethod
    def read(cls, config: dict[str, Any], supported: Collection[str]) -> _Tower:
        found = config.get("vision_config")
        vision: dict[str, Any] = found if isinstance(found, dict) else {}
        kind = str(vision.get("model_type"))
        if kind not in supported:
            raise CheckpointError(f"config.json: vision_config.model_type {kind[:80]!r} is not supported")
        side, patch = (
            _positive(vision, name, f"config.json: vision_config.{name}") for name in ("image_size", "patch_size")
        )
        if patch > side:
            raise CheckpointError(f"config.json: vision_config.patch_size {patch} is more than image_size {side}")
        return cls(kind, side, side // patch)


def _read_processor(folder: Path) -> dict[str, Any]:
    """Return the entries about images, found where transformers finds them. Raises CheckpointError."""
    processor, path = folder / _PROCESSOR, folder / _IMAGE_PROCESSOR
    entries = read_json(processor).get("image_processor") if processor.exists() else None
    if not isinstance(entries, dict):
        if not path.exists():
            raise CheckpointError(f"the model reads images, but its checkpoint has no {_IMAGE_PROCESSOR}")
        entries = read_json(path)
    if other := sorted(name for name in entries if name.startswith("do_") and entries[name] and name not in _STEPS):
        raise CheckpointError(f"{_IMAGE_PROCESSOR}: {other[0][:80]} is not supported")
    return entries


def _placeholder(config: dict[str, Any]) -> int:
    token_id = config.get("image_token_id", config.get("image_token_index"))
    if type(token_id) is not int or token_id < 0:
        raise CheckpointError("config.json: image_token_index must be the id of a token")
    return token_id


def _filter(entries: dict[str, Any], default: int) -> int:
    resample = entries.get("resample", default)
    if resample not in _RESAMPLE:
        raise CheckpointError(f"{_IMAGE_PROCESSOR}: resample {str(resample)[:80]!r} is not supported")
    return int(resample)


def _positive(entries: dict[str, Any], name: str, shown: str) -> int:
    value = entries.get(name)
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{shown} must be a positive integer")
    return value


_READERS: Mapping[str, Callable[[Path, dict[str, Any]], ImageFormat]] = {
    "LlavaForConditionalGeneration": _read_llava,
    "Gemma3ForConditionalGeneration": _read_gemma3,
}
"""By architecture, those whose images are read."""
