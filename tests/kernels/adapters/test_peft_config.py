"""Every entry of `adapter_config.json` acts as in PEFT, or is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from quipu.kernels.adapters.peft_config import parse_peft_config
from tests.kernels.adapters.peft_adapters import wrapped

MODULES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1)
    for module in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
]
SETTINGS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "self_attn.v_proj", "model.layers.1.mlp.up_proj", "proj"]},
    {"target_modules": "all-linear", "exclude_modules": ["o_proj", "layers.0.mlp.up_proj"]},
    {"target_modules": "ALL-LINEAR", "exclude_modules": r".*\.0\..*"},
    {"target_modules": r"model\.layers\.\d\.(self_attn\.[qk]|mlp\.down)_proj"},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1, 0], "layers_pattern": ["blocks", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj", "k_proj"], "r": 3, "lora_alpha": 5, "use_rslora": True},
    {
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "rank_pattern": {"q_proj": 5, "layers.0.self_attn.q_proj": 6, r".*\.1\..*[kv]_proj": 7, "^k_proj": 9},
        "alpha_pattern": {"1.self_attn.(q|k)_proj": 2.5, "v_pro": 9},
        "use_rslora": True,
    },
    {"target_modules": ["q_proj"], "lora_dropout": 0.5, "fan_in_fan_out": True, "init_lora_weights": "gaussian"},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_as_in_peft(checkpoints: dict[str, Path], settings: dict[str, Any]) -> None:
    """Change the same modules with the same rank and scale as PEFT's model."""
    model = wrapped(checkpoints["llama"], "float32", **settings)
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    config = parse_peft_config(json.loads(json.dumps(LoraConfig(**settings).to_dict(), default=list)) | settings)
    assert {module for module in (*MODULES, "lm_head") if config.has(module)} == layers.keys()
    for name, layer in layers.items():
        assert config.rank(name) == layer.r["default"]
        assert config.scale(name) == pytest.approx(layer.scaling["default"])


MINIMAL = {"peft_type": "LORA", "target_modules": ["q_proj"]}


def test_defaults_and_entries_without_effect() -> None:
    """Have PEFT's defaults, and accept every entry that PEFT writes for an ordinary adapter."""
    config = parse_peft_config(MINIMAL)
    assert (config.rank("q_proj"), config.scale("q_proj")) == (8, 1.0)
    saved = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", base_model_name_or_path="x").to_dict()
    assert parse_peft_config(json.loads(json.dumps(saved, default=list))).has("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"arrow_config": {"a": 1}}, "arrow_config"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"invented_in_2030": 0}, "invented_in_2030"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"init_lora_weights": ["x"]}, "init_lora_weights"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": {"q_proj": 1}}, "target_modules"),
        ({"target_modules": "(", "r": 1}, "target_modules"),
        ({"target_modules": ".*", "layers_to_transform": [1]}, "layers_to_transform"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform"),
        ({"layers_to_transform": 1, "layers_pattern": "l.*"}, "layers_pattern"),
        ({"exclude_modules": 3}, "exclude_modules"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"r": 2.5}, "r is 2.5"),
        ({"r": 1 << 70}, "r is"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ({"alpha_pattern": {"(q": 1}}, "alpha_pattern"),
    ],
    ids=str,
)
def test_refusals(entries: dict[str, Any], said: str) -> None:
    """Name the entry that is wrong or not supported."""
    with pytest.raises(ValueError, match=f"adapter_config.json: .*{said}"):
        parse_peft_config(MINIMAL | entries)
