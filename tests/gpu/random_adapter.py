"""Adapters with random matrices for every module that a model lets them change, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_adapter(folder: Path, linear: Mapping[str, tuple[int, ...]], *, rank: int, seed: int) -> Path:
    """Save one that changes all these modules, whose shapes are given, by about a tenth."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (rows, width) in linear.items():
        for which, shape in (("A", (rank, width)), ("B", (rows, rank))):
            matrix = torch.randn(shape, generator=random) * (0.6 if which == "A" else 0.1) * shape[1] ** -0.5
            tensors[f"base_model.model.{module}.lora_{which}.weight"] = matrix
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(linear)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
