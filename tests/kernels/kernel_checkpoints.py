"""Small random checkpoints of every family, and backends of them.

Imported by the tests; `conftest.py` has the checkpoints made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from quipu.kernels.backend import BackendConfig
from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.family_configs import CONFIGS

FEW = ("qwen3-tied", "qwen3-odd", "llama", "llama-rope3")
"""Checkpoints for tests that are not about families."""
THOROUGH = ("qwen3-odd", "llama-rope3", "gemma2", "qwen3-moe", "gpt-oss")
"""Checkpoints that together use every operation: long tests use only these, `make test-long` uses all."""
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
"""Settings of a backend for each kind of weights and KV cache."""
CPU_FORMATS = {
    **FORMATS,
    "int8-bytes": {**FORMATS["int8"], "activations": "int8"},
    "int4-bytes": {**FORMATS["int4"], "activations": "int8"},
}
"""Those of the CPU kernels, which also multiply activations in 8 bits."""
EACH = [pytest.param(name, marks=() if name in THOROUGH else pytest.mark.slow) for name in CONFIGS]
_LESS_OFTEN = {
    "int8-kv": ("qwen3-odd", "gemma2"),  # three query heads per key/value head; windows and soft caps
    "int8": ("qwen3-odd", "qwen3-moe"),  # widths that no vector length divides, biases; experts
    "int4": ("llama-rope3", "qwen3-moe"),  # whole groups, a tied head
    "int8-bytes": ("qwen3-odd", "qwen3-moe"),
    "int4-bytes": ("llama-rope3", "qwen3-moe"),
}
"""Checkpoints that are enough for a format; the others are tried with all."""


def _in_each(formats: Iterable[str]) -> list[Any]:
    """Return pairs of a checkpoint and a format, as parameters of a test."""
    return [
        pytest.param((name, numbers), marks=() if name in THOROUGH else pytest.mark.slow)
        for name in CONFIGS
        for numbers in formats
        if name in _LESS_OFTEN.get(numbers, CONFIGS)
    ]


IN_EACH_FORMAT, IN_EACH_CPU_FORMAT = _in_each(FORMATS), _in_each(CPU_FORMATS)


def make_model(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Make a model with weights large enough to spread logits (transformers' own leave them nearly flat).

    `config` may differ from that of the checkpoint `name`, whose seed it has.
    """
    torch.manual_seed(list(CONFIGS).index(name))  # new ones are added at the end, which changes no other
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("scale"):
                parameter.uniform_(-0.5, 0.5) if name in ("gemma2", "gemma3") else parameter.uniform_(0.5, 1.5)
                if name.startswith(("gemma3n", "gemma4")) and parameter_name.endswith("q_norm.weight"):
                    parameter.mul_(0.2)  # scores have no other factor
            elif parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif parameter.dim() == 1:
                parameter.normal_(std=2.0)  # sinks, beside scores
            else:
                # gates of per-layer inputs read what no norm has made small, and exponentials must not overflow
                factor = 0.5 if "per_layer_input_gate" in parameter_name else 1.5
                if "modality_router" in parameter_name:
                    factor *= parameter.shape[1]  # by which what it reads is divided
                elif parameter_name.endswith("_coefs.weight"):
                    factor = 0.3  # copies that nearly cancel each other make differences larger
                parameter.normal_(std=factor * parameter.shape[1] ** -0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.0)
    return model


def make_checkpoint(folder: Path, name: str, *, max_shard_size: str = "1GB") -> Path:
    make_model(name, CONFIGS[name]()).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


class Checkpoints(dict[str, Path]):
    """Checkpoints by their names in CONFIGS, each made when it is first asked for; `qwen3-tied` is sharded.

    Several processes may have the same folder: of those that make the same checkpoint at once, one keeps it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            mine = self._folder / f"{name} by {os.getpid()}"
            with torch.random.fork_rng(devices=[]):
                make_checkpoint(mine, name, max_shard_size="60KB" if name == "qwen3-tied" else "1GB")
            try:
                mine.rename(path)
            except OSError:  # another process was first
                shutil.rmtree(mine)
        self[name] = path
        return path


def backend_config(model_path: Path, **changes: Any) -> BackendConfig:
    return BackendConfig(
        **{
            "model_path": model_path,
            "dtype": "auto",
            "load_format": "auto",
            "block_size": 16,
            "num_blocks": 160,
            "max_num_seqs": 8,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            **changes,
        }
    )


def make_backend(model_path: Path, **changes: Any) -> ReferenceBackend:
    """Make a backend whose cache is filled with NaN, so that reading an unwritten slot is detected."""
    backend = ReferenceBackend(backend_config(model_path, **changes))
    backend.cache.fill(float("nan"))
    return backend
