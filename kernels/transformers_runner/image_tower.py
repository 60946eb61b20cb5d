"""The part of a model that turns an image into what its decoder reads in the place of the image's placeholders.

`transformers_backend.py` has one if the model reads images. What must always hold: an image's features depend on its
pixels alone, so that they are the same wherever a chunk of its placeholders ends; few of them are held at once.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from ..batch import StepBatch
from ..step_types import PromptImage

MOST_HELD = 16
"""Images whose features are held: those of long prompts are computed in several passes."""
_PROCESSOR, _IMAGE_PROCESSOR = "processor_config.json", "preprocessor_config.json"


@attrs.frozen
class Normalization:
    """How pixels become numbers."""

    factor: float = 1 / 255
    mean: Sequence[float] = (0.0, 0.0, 0.0)
    std: Sequence[float] = (1.0, 1.0, 1.0)

    @classmethod
    def read(cls, folder: Path) -> Normalization:
        """Read it from a checkpoint. Raises ValueError if it is not there, or is none."""
        entries = read_image_processor(folder)
        factor = entries.get("rescale_factor", 1 / 255) if entries.get("do_rescale", True) else 1.0
        if not entries.get("do_normalize", True):
            return cls(float(factor))
        mean, std = (_three(entries, name) for name in ("image_mean", "image_std"))
        return cls(float(factor), mean, std)


def _three(entries: dict[str, Any], name: str) -> list[float]:
    value = entries.get(name)
    if not isinstance(value, list) or len(value) != len("RGB"):
        raise ValueError(f"preprocessor_config.json: {name} must be a list of three numbers")
    return [float(number) for number in value]


def read_image_processor(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says about its images, which transformers too seeks in this order.

    Raises ValueError if there is nothing.
    """
    paths = folder / _PROCESSOR, folder / _IMAGE_PROCESSOR
    whole, own = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in paths)
    entries = whole.get("image_processor") or own
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"the checkpoint reads images, but has no {_IMAGE_PROCESSOR}")
    return entries


@attrs.frozen
class TowerMemory:
    """What images take of a device's memory, in bytes."""

    one: int
    """While one of them is computed."""
    held: int
    """Of the features that are held."""


class ImageTower:
    """Computes the features of images, and keeps the last ones."""

    def __init__(self, model: Any, normalization: Normalization) -> None:
        self._model = model
        self._how = normalization
        self._held: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def place(self, x_ND: torch.Tensor, batch: StepBatch) -> None:
        """Replace the embeddings of placeholders by features of their images."""
        for part in batch.images:
            token = batch.query_start[part.row] + part.offset
            x_ND[token : token + part.count] = self.features(part.image)[part.first : part.first + part.count]

    def measure(self, peak_of: Callable[[Callable[[], object]], int]) -> TowerMemory:
        """Compute the features of an image without pixels, as measured by `peak_of`."""
        side = self._model.config.vision_config.image_size
        values_13HW = torch.zeros((1, 3, side, side), device=self._model.device, dtype=self._model.dtype)
        found: list[torch.Tensor] = []

        def run() -> None:
            with torch.inference_mode():
                found.append(self._compute(values_13HW))

        return TowerMemory(one=peak_of(run), held=(MOST_HELD + 1) * found[0].nbytes)

    def _compute(self, values_13HW: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self._model.get_image_features(values_13HW).pooler_output))

    def features(self, image: PromptImage) -> torch.Tensor:
        """Return `[T, D]`. Raises ValueError for an image that has another number of placeholders."""
        found = self._held.pop(image.digest, None)
        if found is None:
            found = self._compute(self.pixel_values(image))
            if len(found) != image.num_tokens:
                raise ValueError(f"an image of {len(found)} tokens has {image.num_tokens} placeholders")
        self._held[image.digest] = found
        if len(self._held) > MOST_HELD:
            self._held.popitem(last=False)
        return found

    def pixel_values(self, image: PromptImage) -> torch.Tensor:
        """Return `[1, 3, H, W]`, as the model's processor makes it."""
        mean, std = (np.asarray(three, np.float32) for three in (self._how.mean, self._how.std))
        pixels_HW3 = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
        values_HW3 = (pixels_HW3.astype(np.float32) * np.float32(self._how.factor) - mean) / std
        values_13HW = torch.from_numpy(np.ascontiguousarray(values_HW3.transpose(2, 0, 1))).unsqueeze(0)
        return values_13HW.to(self._model.device, self._model.dtype)
