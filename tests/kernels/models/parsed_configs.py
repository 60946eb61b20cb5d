"""The config.json of each family's test checkpoint, changed and parsed. No weights are loaded."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quipu.kernels.models.config import DecoderConfig
from quipu.kernels.models.families import find_family
from tests.kernels.family_configs import CONFIGS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "partial_rotary_factor": 0.5}


@cache
def _written(name: str) -> dict[str, Any]:
    written: dict[str, Any] = CONFIGS[name]().to_dict()
    return written


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json that transformers writes for a checkpoint, with entries changed; `...` removes one."""
    config = {**deepcopy(_written(name)), **changes}
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    return {key: value for key, value in config.items() if value is not ...}


def parse(name: str, **changes: Any) -> DecoderConfig:
    data = config_of(name, **changes)
    return find_family(data).parse(data)
