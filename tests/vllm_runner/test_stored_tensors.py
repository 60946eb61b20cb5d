"""Which checkpoints lack a tensor of their model, and which only store it in another way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quipu.kernels.vllm_runner.stored_tensors import check_stored
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import make_checkpoint

Tensors = dict[str, torch.Tensor]
ATTENTION = "model.layers.1.self_attn."


def change(folder: Path, how: Callable[[Tensors], object], **entries: Any) -> Path:
    """Change a checkpoint's tensors, and add entries to its config.json."""
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_complete_checkpoints(tmp_path: Path, name: str) -> None:
    """Whatever the family, and in however many files, what transformers saves is complete."""
    check_stored(make_checkpoint(tmp_path, name, max_shard_size="60KB"))


@pytest.mark.parametrize("name", ["qwen3-odd", "gemma2", "phi3", "qwen3-moe"])
def test_each_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    """Matrices, biases, norms, experts: without any one of its tensors, a checkpoint is refused."""
    whole = load_file(make_checkpoint(tmp_path, name) / "model.safetensors")
    for lost in whole:
        save_file({each: tensor for each, tensor in whole.items() if each != lost}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"^checkpoint lacks tensor {lost}$"):
            check_stored(tmp_path)


def test_stored_fused(tmp_path: Path) -> None:
    """A part of a matrix is not missed where the whole one is stored."""

    def fuse(tensors: Tensors) -> None:
        parts = [tensors.pop(f"{ATTENTION}{part}_proj.weight") for part in "qkv"]
        tensors[f"{ATTENTION}qkv_proj.weight"] = torch.cat(parts)

    check_stored(change(make_checkpoint(tmp_path, "llama"), fuse))


def test_experts_stored_together(tmp_path: Path) -> None:
    """Experts may be stored as one tensor; one without a part of them lacks it."""

    def stack(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            del tensors[name]
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(1)
        tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(1)

    folder = change(make_checkpoint(tmp_path, "qwen3-moe"), stack)
    check_stored(folder)
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj"))
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"):
        check_stored(folder)


def test_quantized(tmp_path: Path) -> None:
    """A quantized matrix has other names; one of which nothing is stored is missed."""

    def quantize(tensors: Tensors) -> None:
        for part in "qk":
            tensors[f"{ATTENTION}{part}_proj.qweight"] = tensors.pop(f"{ATTENTION}{part}_proj.weight")

    folder = change(make_checkpoint(tmp_path, "llama"), quantize)
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.1\.self_attn\.q_proj\.weight"):
        check_stored(folder)
    check_stored(change(folder, lambda tensors: None, quantization_config={"quant_method": "awq"}))
    change(folder, lambda tensors: tensors.pop(f"{ATTENTION}k_proj.qweight"))
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.1\.self_attn\.k_proj\.weight"):
        check_stored(folder)


@pytest.mark.parametrize(
    "entries", [{"architectures": ["OlmoForCausalLM"]}, {"rope_parameters": {"rope_type": "unheard-of"}}]
)
def test_what_only_vllm_knows(tmp_path: Path, entries: dict[str, Any]) -> None:
    """Of other families, and with settings that we do not serve, it is not known what a model consists of."""
    folder = make_checkpoint(tmp_path, "llama")
    check_stored(change(folder, lambda tensors: tensors.pop("model.norm.weight"), **entries))
