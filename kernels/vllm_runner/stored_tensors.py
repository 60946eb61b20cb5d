"""Checks that a checkpoint has every tensor of its model, for the families that our own kernels serve.

`vllm_loading.py` calls `check_stored` before vLLM reads weights. vLLM fills a fused matrix (q, k and v; gate and up)
from what the files have and does not miss a part of it; of a quantized checkpoint it misses nothing.

What must always hold: only headers are read; what is stored fused, or quantized under other names, counts as stored.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch

from ..checkpoints.files import read_header
from ..checkpoints.row_slices import whole_name
from ..checkpoints.weights import Shape
from ..models.config import read_config
from ..models.families import FAMILIES

_FUSED = (
    (re.compile(r"\.(q|k|v)_proj$"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj$"), ".experts.gate_up_proj"),
    (re.compile(r"\.experts\.\d+\.down_proj$"), ".experts.down_proj"),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj$"), ".input_linear"),
    (re.compile(r"\.experts\.\d+\.down_proj$"), ".output_linear"),
)
"""Modules whose matrices may be stored as a part of another's."""
_QUANTIZED_BY = ("quantization_config", "compression_config")
_QUANTIZED_IN = "hf_quant_config.json"


def check_stored(model_path: Path) -> None:
    """Raises ValueError naming a tensor that a checkpoint in safetensors lacks.

    Nothing is checked where vLLM alone knows the family, or an entry of its configuration, or reads the files.
    """
    data = read_config(model_path)
    family = next((FAMILIES[name] for name in data.get("architectures") or [] if name in FAMILIES), None)
    files = sorted(model_path.glob("*.safetensors"))
    if family is None or not files:
        return
    try:
        config = family.parse(data, ignored=None)
        stored = {tensor.name for file in files for tensor in read_header(file)}
    except ValueError:
        return  # vLLM may serve what we do not, and says what it does not
    is_quantized = any(key in data for key in _QUANTIZED_BY) or (model_path / _QUANTIZED_IN).exists()
    family.build(config, _Names(stored, is_quantized=is_quantized), 1)


class _Names:
    """Implements `Weights`: tensors that have shapes only, if a checkpoint has their names."""

    num_bytes = 0

    def __init__(self, stored: Collection[str], *, is_quantized: bool) -> None:
        self._stored = stored
        self._is_quantized = is_quantized
        self._modules = {name.rpartition(".")[0] for name in stored} | set(stored)

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        if not self._has(name):
            raise ValueError(f"checkpoint lacks tensor {name}")
        return torch.empty(shape, device="meta")

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        return torch.cat([self.tensor(name, shape) for name, shape in parts])

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        pass

    def _has(self, name: str) -> bool:
        name = whole_name(name)
        module, _, _ = name.rpartition(".")
        if name in self._stored or (self._is_quantized and module in self._modules):
            return True
        return any(part.search(module) and part.sub(whole, module) in self._modules for part, whole in _FUSED)
