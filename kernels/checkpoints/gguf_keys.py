"""The keys of a GGUF file's architecture: each is read, known not to matter, or refused. No torch.

What must always hold: a key that changes what is computed is part of the result or refused by name; one that is not
understood becomes an entry of `config.json`, where it is refused like any other (`models/refusals.py`).
"""

from __future__ import annotations

import struct
from typing import Any

from .gguf_file import GgufFile, shown

_ZERO = (0, 0.0)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
            "attention.output_scale",
            "attention.scale",
            "attention.shared_kv_layers",
            "attention.sliding_window",
            "attention.temperature_length",
            "attention.temperature_scale",
            "attn_logit_softcapping",
            "embedding_length_per_layer_input",
            "expert_count",
            "expert_feed_forward_length",
            "expert_shared_count",
            "expert_shared_feed_forward_length",
            "expert_used_count",
            "final_logit_softcapping",
            "leading_dense_block_count",
            "nextn_predict_layers",
            "rope.scaling.yarn_log_multiplier",
            "router_logit_softcapping",
        ),
        _ZERO,
    ),
    **dict.fromkeys(
        (
            "embedding_scale",
            "expert_gating_func",
            "expert_group_count",
            "expert_group_used_count",
            "expert_weights_scale",
            "logit_scale",
            "residual_scale",
        ),
        (0, 1),
    ),
    "attention.causal": (True,),
    "expert_weights_norm": (True,),
    "pooling_type": (0, 3),  # none, or the last token's states, as here
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that change what is computed, by the values that do not."""
_UNUSED = frozenset(
    {
        "attention.layer_norm_epsilon",  # of the kind of norm that an architecture does not have
        "attention.layer_norm_rms_epsilon",
        "rope.scaling.finetuned",  # how the model was trained
        "rope.scaling.yarn_beta_fast",  # of another type of scaling
        "rope.scaling.yarn_beta_slow",
        "vocab_size",  # the embedding's
    }
)
"""Keys that change nothing where they are not read, whatever their values."""


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

    def others(self) -> dict[str, str]:
        """Return the keys that are not understood, whole, and their values in words.

        Raises ValueError for a key that was not read and changes what is computed.
        """
        others = sorted(self._keys.keys() - self._read)
        for name in others:
            if name in _NEUTRAL and self._keys[name] not in _NEUTRAL[name]:
                raise ValueError(f"key '{self._prefix}{name}' {shown(self._keys[name])} is not supported")
        unknown = [name for name in others if name not in _UNUSED and name not in _NEUTRAL]
        return {f"{self._prefix}{name}": shown(self._keys[name]) for name in unknown}


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
