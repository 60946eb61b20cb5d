"""An adapter's `adapter_config.json`, read as PEFT reads it (`LoraConfig` of peft 0.21).

Every entry either acts as in PEFT, or has no effect on a loaded adapter in PEFT either, or is refused by its name: an
adapter must never load and answer as another one would.

What must always hold: module names are those of the checkpoint's tensors, without `.weight`, as in transformers.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from ..models.entry_types import is_number, is_whole, shown
from .name_patterns import NamePattern


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _names(
    """peft_type task_type bias init_lora_weights use_rslora layers_to_transform layers_pattern target_modules
    exclude_modules r lora_alpha rank_pattern alpha_pattern"""
)
_WITHOUT_EFFECT = _names(
    """auto_mapping base_model_name_or_path revision peft_version inference_mode lora_dropout fan_in_fan_out
    megatron_core loftq_config eva_config corda_config lora_ga_config runtime_config qalora_group_size"""
)
"""Entries that matter while an adapter is trained or initialised, or for layers that are not linear."""
_INITIALISATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""
_ALL_LINEAR = "all-linear"
_MOST_NAMES = 10_000


@attrs.frozen
class Targets:
    """Which modules an adapter changes."""

    names: tuple[str, ...] = ()
    """Whole names, or their last parts."""
    pattern: NamePattern | None = None
    is_all_linear: bool = False
    """All linear modules but the output head."""

    def has(self, module: str) -> bool:
        if self.is_all_linear:
            return module != "lm_head"
        if self.pattern is not None:
            return self.pattern.matches(module)
        return module in self.names or module.endswith(tuple("." + name for name in self.names))


@attrs.frozen
class PeftConfig:
    """What an adapter's configuration says of each module."""

    targets: Targets
    excluded: Targets
    layers: frozenset[int] | None
    """None: all. Applies to modules that a target's last part names."""
    layers_named: bool
    """Whether `layers_pattern` allows the name that layers have: `layers`."""
    rank_of_others: int
    alpha_of_others: float
    ranks: tuple[tuple[NamePattern, int], ...]
    alphas: tuple[tuple[NamePattern, float], ...]
    use_rslora: bool

    def has(self, module: str) -> bool:
        """Return whether the adapter changes this module. Raises ValueError for a pattern that is not supported."""
        if self.excluded.has(module) or not self.targets.has(module):
            return False
        if self.layers is None or module in self.targets.names:
            return True
        parts = module.split(".")
        return self.layers_named and parts[:2] == ["model", "layers"] and int(parts[2]) in self.layers

    def rank(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.matches_end(module)), self.rank_of_others)

    def scale(self, module: str) -> float:
        """Return the factor of the product: `lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`."""
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.matches_end(module)), self.alpha_of_others)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_peft_config(data: dict[str, Any]) -> PeftConfig:
    """Read the configuration. Raises ValueError naming the first entry that is wrong or not supported."""
    if data.get("peft_type") != "LORA":
        raise _wrong("peft_type", data.get("peft_type"), "LORA: no other kind of adapter is supported")
    if data.get("task_type") not in (None, "CAUSAL_LM"):
        raise _wrong("task_type", data["task_type"], "CAUSAL_LM")
    if data.get("bias") not in (None, "none"):
        raise _wrong("bias", data["bias"], "none: biases of adapters are not supported")
    initialisation = data.get("init_lora_weights")
    if not any(initialisation is value or initialisation == value for value in _INITIALISATIONS):
        raise ValueError(
            f"adapter_config.json: init_lora_weights {shown(initialisation)} changes the base model's weights, which "
            "is not supported: convert the adapter to one of the original weights"
        )
    rslora = data.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise _wrong("use_rslora", rslora, "true or false")
    layers, targets = _layers(data.get("layers_to_transform")), data.get("target_modules")
    if not targets:
        raise _wrong("target_modules", targets, "the names of modules, or an expression that matches them")
    if layers is not None and isinstance(targets, str):
        raise ValueError("adapter_config.json: layers_to_transform needs target_modules to be a list of names")
    patterns = _texts("layers_pattern", data.get("layers_pattern"))
    if not all(name.replace("_", "a").isalnum() for name in patterns):
        raise _wrong("layers_pattern", list(patterns), "names")
    config = PeftConfig(
        targets=_targets("target_modules", targets),
        excluded=_targets("exclude_modules", data.get("exclude_modules")),
        layers=layers,
        layers_named=not patterns or "layers" in patterns,
        rank_of_others=_rank("r", data.get("r", 8)),
        alpha_of_others=_alpha("lora_alpha", data.get("lora_alpha", 8)),
        ranks=tuple((name, _rank("rank_pattern", value)) for name, value in _pairs("rank_pattern", data)),
        alphas=tuple((name, _alpha("alpha_pattern", value)) for name, value in _pairs("alpha_pattern", data)),
        use_rslora=rslora,
    )
    _refuse_others(data)
    return config


def _refuse_others(data: dict[str, Any]) -> None:
    """Raises ValueError for any entry of PEFT's that is switched on and not supported, and for any that is unknown."""
    for name in sorted(data.keys() - _READ - _WITHOUT_EFFECT):
        value = data[name]
        if value is not None and value is not False and value not in ({}, []):
            raise ValueError(f"adapter_config.json: {shown(name)} {shown(value)} is not supported")


def _targets(entry: str, value: object) -> Targets:
    if isinstance(value, str) and entry == "target_modules" and value.lower() == _ALL_LINEAR:
        return Targets(is_all_linear=True)
    if isinstance(value, str) and value:
        return Targets(pattern=NamePattern(entry, value))
    return Targets(names=_texts(entry, value))


def _texts(entry: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) and value else value or []
    if not isinstance(texts, list) or len(texts) > _MOST_NAMES or not all(isinstance(text, str) for text in texts):
        raise _wrong(entry, value, "a name or a list of names")
    return tuple(texts)


def _layers(value: object) -> frozenset[int] | None:
    layers = [value] if is_whole(value) else value
    if layers is None or layers == []:
        return None
    if not isinstance(layers, list) or len(layers) > _MOST_NAMES or not all(map(is_whole, layers)):
        raise _wrong("layers_to_transform", value, "an integer or a list of integers")
    return frozenset(layers)


def _pairs(entry: str, data: dict[str, Any]) -> list[tuple[NamePattern, object]]:
    value = data.get(entry) or {}
    if not isinstance(value, dict) or len(value) > _MOST_NAMES:
        raise _wrong(entry, value, "an object of numbers by module name")
    return [(NamePattern(entry, name), number) for name, number in value.items()]


def _rank(entry: str, value: object) -> int:
    if not isinstance(value, int) or not is_whole(value) or value <= 0:
        raise _wrong(entry, value, "a positive integer")
    return value


def _alpha(entry: str, value: object) -> float:
    if not isinstance(value, int | float) or not is_number(value):
        raise _wrong(entry, value, "a number")
    return float(value)


def _wrong(entry: str, value: object, expected: str) -> ValueError:
    return ValueError(f"adapter_config.json: {entry} is {shown(value)}, must be {expected}")
