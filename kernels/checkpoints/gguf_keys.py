"""The keys of a GGUF file's architecture: each is read, known not to matter, or refused. No torch.

What must always hold: a key that changes what is computed is part of the result or refused by name.
"""

from __future__ import annotations

import logging
import struct
from typing import Any

from .gguf_file import GgufFile, shown

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
"""Keys that change what is computed, by the values that do not."""
_MAX_LISTED = 20
"""Of unknown keys in the log."""

_log = logging.getLogger(__name__)


class Keys:
    """The keys of the file's architecture, by what follows it in their names."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._prefix = f"{architecture}."
        self._keys = {
            name.removeprefix(self._prefix): value for name, value in file.keys.items() if name.startswith(self._prefix)
        }
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._keys.get(name, default)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"key '{self._prefix}{name}' is {shown(value)}, must be one integer")
        return value

    def each(self, name: str, count: int) -> list[int]:
        """Return a number for each layer, which a file may have one of for all."""
        value = self.take(name)
        if not isinstance(value, list):
            return [self.whole(name)] * count
        if len(value) != count or not all(type(one) is int for one in value):
            raise ValueError(f"key '{self._prefix}{name}' is {shown(value)}, must be {count} integers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"key '{self._prefix}{name}' is {shown(value)}, must be a number")
        return shortest(value)

    def refuse_others(self) -> None:
        """Raises ValueError for a key that was not read and changes what is computed."""
        others = sorted(self._keys.keys() - self._read)
        for name in others:
            if name in _NEUTRAL and self._keys[name] not in _NEUTRAL[name]:
                raise ValueError(f"key '{self._prefix}{name}' {shown(self._keys[name])} is not supported")
        unknown = [f"{self._prefix}{name}" for name in others if name not in _NEUTRAL and name != "vocab_size"]
        if unknown:
            _log.warning("ignoring keys: %s", ", ".join(unknown[:_MAX_LISTED]))


def has(file: GgufFile, part: str) -> bool:
    """Return whether the first layer has a tensor."""
    return f"blk.0.{part}" in file.tensors


def taken(keys: Keys, names: dict[str, str]) -> dict[str, Any]:
    return {ours: keys.whole(theirs) for theirs, ours in names.items()}


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same float32: the one that was written."""
    if isinstance(value, int):
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in (7, 8))
    return next((number for number in shorter if _as_float32(number) == value), value)


def _as_float32(number: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return number
