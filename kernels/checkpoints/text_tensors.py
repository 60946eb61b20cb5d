"""The tensors of the decoder in a checkpoint of a model that also reads images or sound, by their names in a decoder.

`weights.py` calls this for every checkpoint; the configuration decides whether such a model is served at all.

What must always hold: of a tower nothing is read, and no other tensor is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

_T = TypeVar("_T")
_TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
"""How names of the decoder begin, in either of two layouts, and how they do in a decoder alone."""
_TOWERS = tuple(
    f"{prefix}{name}."
    for prefix in ("model.", "")
    for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector", "vision_model")
)


def of_text(named: Mapping[str, _T]) -> dict[str, _T]:
    """Return what belongs to the decoder, if others are there, too; else all of it."""
    if not any(name.startswith(tuple(_TEXT)) for name in named):
        return dict(named)
    return {_renamed(name): one for name, one in named.items() if not name.startswith(_TOWERS)}


def _renamed(name: str) -> str:
    start = next((start for start in _TEXT if name.startswith(start)), None)
    return name if start is None else _TEXT[start] + name.removeprefix(start)
