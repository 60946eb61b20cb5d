"""Experts that a checkpoint stores as one tensor per layer, plain or in MXFP4, have the values of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quipu.kernels.checkpoints.files import StoredTensor
from quipu.kernels.checkpoints.stacked_experts import read_stacked
from quipu.kernels.checkpoints.weights import open_weights
from quipu.kernels.models.config import read_config
from tests.kernel_markers import needs_kernels
from tests.kernels.cpu.cpu_backends import make_cpu_backend
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.oracles import differences, run

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.1.mlp.experts."
GATE_UP, DOWN = EXPERTS + "gate_up_proj", EXPERTS + "down_proj"


def change(folder: Path, edit: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def packed(tensors: Tensors) -> None:
    """Replace the experts' matrices by random ones in MXFP4."""
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(119, 125, shape[:3], dtype=torch.uint8, generator=generator)


@pytest.fixture
def in_mxfp4(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(checkpoints["gpt-oss"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    change(tmp_path / "model", packed)
    return tmp_path / "model"


def read(folder: Path, name: str, shape: tuple[int, ...], *, quantization: str | None = None) -> torch.Tensor:
    config = read_config(folder)
    weights, _ = open_weights(folder, config, load_format="auto", dtype="float32", quantization=quantization)
    return weights.tensor(name, shape)


def expect(folder: Path, gate_up_XIO: torch.Tensor, down_XIO: torch.Tensor) -> None:
    """Check the matrices of each expert."""
    for expert in range(5):
        prefix = f"{EXPERTS}{expert}."
        assert torch.equal(read(folder, prefix + "gate_proj.weight", (64, 64)), gate_up_XIO[expert, :, ::2].T)
        assert torch.equal(read(folder, prefix + "up_proj.weight", (64, 64)), gate_up_XIO[expert, :, 1::2].T)
        assert torch.equal(read(folder, prefix + "down_proj.weight", (64, 64)), down_XIO[expert].T)


def test_plain_experts(checkpoints: dict[str, Path]) -> None:
    """Matrices and biases are those of the expert, gate and up apart."""
    folder = checkpoints["gpt-oss"]
    stored = load_file(folder / "model.safetensors")
    expect(folder, stored[GATE_UP], stored[DOWN])
    bias = read(folder, f"{EXPERTS}3.up_proj.bias", (64,))
    assert torch.equal(bias, stored[f"{GATE_UP}_bias"][3, 1::2])


def test_mxfp4_values(in_mxfp4: Path) -> None:
    """Every code and the extreme scales have transformers' values."""

    def extreme(tensors: Tensors) -> None:
        tensors[f"{GATE_UP}_scales"].view(-1)[:4] = torch.tensor([0, 1, 127, 200], dtype=torch.uint8)

    change(in_mxfp4, extreme)
    stored = load_file(in_mxfp4 / "model.safetensors")
    gate_up, down = (
        convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        for name in (GATE_UP, DOWN)
    )
    expect(in_mxfp4, gate_up, down)
    assert len(down.abs().mul(2**8).unique()) > 8


@needs_kernels
@pytest.mark.parametrize(("activations", "tolerance"), [("auto", 0.01), ("int8", 0.05)])
def test_mxfp4_logits(in_mxfp4: Path, activations: str, tolerance: float) -> None:
    """The CPU kernels, which multiply codes, compute what the reference does with dequantized weights."""
    backend = make_cpu_backend(in_mxfp4, dtype="float32", activations=activations)
    assert backend.capabilities.weights == "mxfp4"
    found = differences(run(backend), run(make_backend(in_mxfp4, dtype="float32")))
    print("mxfp4", found)
    assert found.mean < tolerance and found.regret < 10 * tolerance


WRONG: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("scales", lambda t: t.pop(f"{DOWN}_scales"), "lacks tensor model.layers.1.mlp.experts.down_proj_scales"),
    ("dtype", lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"].float()}), "down_proj_blocks has shape"),
    ("groups", lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][:, :, :1].clone()}), "down_proj_scales has"),
    ("no groups", lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"][:, :, :0].clone()}), "blocks has shape"),
    ("no outputs", lambda t: t.update({f"{DOWN}_bias": torch.zeros(4, 0)}), r"down_proj_bias has shape \(4, 0\)"),
    (
        "no inputs",
        lambda t: t.update({"model.layers.1.block_sparse_moe.input_linear.weight": torch.zeros(4, 8, 0)}),
        r"input_linear.weight has shape \(4, 8, 0\)",
    ),
    ("odd", lambda t: t.update({f"{GATE_UP}_bias": t[f"{GATE_UP}_bias"][:, :127].clone()}), "gate and up of the same"),
    ("width", lambda t: t.update({f"{DOWN}_bias": t[f"{DOWN}_bias"][0].clone()}), "down_proj_bias has shape"),
    ("NaN", lambda t: t[f"{DOWN}_scales"].view(-1).__setitem__(9, 255), "experts.0.down_proj.weight: a scale is not"),
    (
        "experts",
        lambda t: t.update({f"{DOWN}_bias": torch.zeros(6, 64)}),
        "that the model does not use: model.layers.1.mlp.experts.down_proj_bias",
    ),
]


@pytest.mark.parametrize(("edit", "named"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_wrong_tensors(in_mxfp4: Path, edit: Callable[[Tensors], None], named: str) -> None:
    """Tensors that are missing, of a wrong shape, not numbers, or of experts that the config lacks, are named."""
    change(in_mxfp4, edit)
    with pytest.raises(ValueError, match=named):
        make_backend(in_mxfp4)


@pytest.mark.parametrize("name", [GATE_UP, "model.layers.1.block_sparse_moe.output_linear.weight"])
def test_more_experts_than_any_model_has(name: str) -> None:
    """Refuse them before anything is made of each: numbers in a file may all be one hole, which takes no room."""
    tensor = StoredTensor(name, Path("model.safetensors"), "BF16", (1 << 40, 1, 2), 100, 100 + (1 << 42))
    with pytest.raises(ValueError, match=f"tensor {name} is of 1099511627776 experts, at most 65536 are read"):
        read_stacked({name: tensor})


def test_quantizing_while_loading(checkpoints: dict[str, Path]) -> None:
    """Plain experts are quantized like all matrices, biases are not; without a checkpoint, too."""
    folder = checkpoints["gpt-oss"]
    stored = load_file(folder / "model.safetensors")[DOWN][2].T
    found = read(folder, f"{EXPERTS}2.down_proj.weight", (64, 64), quantization="int8")
    assert 0 < (found - stored).abs().max() < stored.abs().max() / 127
    for quantization in ("int8", "int4"):
        assert make_backend(folder, load_format="dummy", quantization=quantization).capabilities.weights.startswith(
            quantization
        )
