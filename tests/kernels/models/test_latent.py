"""Latent attention: one vector of each token in the cache, parts of a stored matrix, and experts chosen by biases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from quipu.kernels.checkpoints.row_slices import rows_of
from quipu.kernels.checkpoints.weights import open_weights
from quipu.kernels.models.decoder_model import Decoder, Mixture
from quipu.kernels.models.families import find_family
from quipu.kernels.opened_model import open_model
from tests.kernels.adapters.peft_adapters import make_adapter
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.cpu.test_shared_prefixes import ATTENDED, NUM_BLOCKS, assert_all_equal
from tests.kernels.kernel_checkpoints import CPU_FORMATS, FORMATS, backend_config, make_backend
from tests.kernels.one_prompt import LENGTH, NUM_COMPARED, run_chunks
from tests.kernels.oracles import TOLERANCES
from tests.kernels.step_batches import scattered_blocks
from tests.kernels.test_block_transfers import cache_of, move

KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
PIECES = [256, 100, LENGTH - 356 - NUM_COMPARED, *[1] * NUM_COMPARED]


def copy_of(checkpoint: Path, folder: Path, entries: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Copy a checkpoint; change entries of its config and tensors."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_bytes()) | entries
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("numbers", [name for name in CPU_FORMATS if name not in ("float32", "bfloat16")])
@pytest.mark.parametrize("make", [make_backend, pytest.param(make_cpu_backend, marks=needs_kernels)])
def test_formats(checkpoints: dict[str, Path], make: Callable[..., Any], numbers: str) -> None:
    """Match one prefill with chunks on other blocks, bit by bit; differ from bfloat16 by what rounding costs."""
    if make is make_backend and numbers not in FORMATS:
        numbers = numbers.replace("-bytes", "")
    path = checkpoints["deepseek-v2-lite"]
    backend = make(path, **CPU_FORMATS[numbers])
    cold = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    backend.cache.fill(float("nan"))
    assert torch.equal(run_chunks(backend, scattered_blocks(33, seed=6), PIECES), cold)
    plain = run_chunks(make(path, dtype="bfloat16"), scattered_blocks(33, seed=5), [LENGTH])
    assert 0 < (cold - plain).abs().mean() / plain.std() < (0.6 if "int4" in numbers else 0.15)


@needs_kernels
@pytest.mark.parametrize("numbers", ["bfloat16", "int8-kv"])
def test_many_heads(checkpoints: dict[str, Path], tmp_path: Path, numbers: str) -> None:
    """Agree with the reference if a token has more heads than the kernels' pieces have rows, and in blocks of 24.

    The bits are the same on several threads, among which a few tokens' heads are divided.
    """
    heads, each, lora = 136, 24 + 40, 48
    path = copy_of(
        checkpoints["deepseek-v2-lite"],
        tmp_path / "many",
        {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 1},
        {},
    )
    tensors = {
        name: tensor for name, tensor in load_file(path / "model.safetensors").items() if ".layers.1." not in name
    }
    generator = torch.Generator().manual_seed(3)
    prefix = "model.layers.0.self_attn."
    for name, rows, width in (
        ("q_proj", heads * 40, 64),
        ("kv_b_proj", heads * each, lora),
        ("o_proj", 64, heads * 40),
    ):
        tensors[f"{prefix}{name}.weight"] = torch.randn(rows, width, generator=generator) * 1.5 * width**-0.5
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = {**FORMATS[numbers], "block_size": 24}
    blocks, pieces = scattered_blocks(22, seed=5), [300, LENGTH - 300 - NUM_COMPARED, *[1] * NUM_COMPARED]
    ours, theirs = (run_chunks(make(path, **settings), blocks, pieces) for make in (make_cpu_backend, make_backend))
    assert (ours - theirs).abs().mean() / theirs.std() < TOLERANCES["bfloat16"].mean
    assert torch.equal(run_chunks(make_cpu_backend(path, num_threads=5, **settings), blocks, pieces), ours)


def test_block_size(checkpoints: dict[str, Path]) -> None:
    """Hold 64 elements of each token and layer: 48 of the latent, and 16 that are rotated."""
    opened = open_model(backend_config(checkpoints["deepseek-v2-lite"]))
    assert opened.block_shape(16, torch.bfloat16).num_bytes == 16 * 64 * 2 * opened.config.num_layers
    assert opened.block_shape(16, torch.int8).num_bytes == 16 * (64 + 4) * opened.config.num_layers


@needs_kernels
@pytest.mark.parametrize("numbers", ["bfloat16", "int8-kv"])
def test_blocks_are_moved(checkpoints: dict[str, Path], numbers: str) -> None:
    """Go on from blocks that an equal backend has computed, by way of the host or from its memory."""
    first, second, third = (
        make_cpu_backend(checkpoints["deepseek-v3"], shares_cache=True, **FORMATS[numbers]) for _ in range(3)
    )
    blocks, others = scattered_blocks(33, seed=5), scattered_blocks(33, seed=6)
    cold = run_chunks(first, blocks, [LENGTH])
    move(first, blocks[:32], second, others[:32])
    third.copy_from(cache_of(first), blocks[:32], others[:32])
    for backend in (second, third):
        assert torch.equal(run_chunks(backend, others, [LENGTH - 512], start=512), cold)
    for backend in (first, second, third):
        backend.close()


@needs_kernels
@pytest.mark.parametrize("numbers", ATTENDED)
def test_shared_prefixes(checkpoints: dict[str, Path], numbers: str) -> None:
    """Read blocks that sequences share once for all, and keep each row's bits."""
    path = checkpoints["deepseek-v2-lite"]
    backend = make_cpu_backend(path, num_threads=2, num_blocks=NUM_BLOCKS, **CPU_FORMATS[numbers])
    cold = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert_all_equal(backend, cold, num_sharers=4, seed=1)


def test_adapters_of_keys_and_values(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Refuse an adapter that changes the matrix of which attention has parts, by its name."""
    path = checkpoints["deepseek-v2-lite"]
    adapter = make_adapter(tmp_path / "adapter", path, target_modules=["kv_b_proj"])
    with pytest.raises(ValueError, match="kv_b_proj"):
        make_backend(path, max_loras=1).load_adapter(adapter)


def test_parts_of_a_matrix(checkpoints: dict[str, Path]) -> None:
    """Return rows, and rows transposed, of a stored matrix; name it if its size is another."""
    path = checkpoints["deepseek-v2-lite"]
    source, _ = open_weights(path, {}, load_format="auto", dtype="float32")
    whole = load_file(path / "model.safetensors")[KV_B]
    total = len(whole)
    rows = source.tensor(rows_of(KV_B, 24, 40, total=total, transposed=False), (40, 48))
    columns = source.tensor(rows_of(KV_B, 64, 24, total=total, transposed=True), (48, 24))
    assert torch.equal(rows, whole[24:64]) and torch.equal(columns, whole[64:88].t())
    with pytest.raises(ValueError, match=rf"tensor {KV_B} has shape \(256, 48\), config.json says \(255, 48\)"):
        source.tensor(rows_of(KV_B, 0, 24, total=255, transposed=True), (48, 24))


def test_biases_are_not_rounded(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Hold the biases that choose experts in float32, which bfloat16 would round to the same number."""
    bias = 8 + torch.arange(9) / 1024
    path = copy_of(checkpoints["deepseek-v3"], tmp_path / "biased", {}, {BIAS: bias})
    opened = open_model(backend_config(path, dtype="bfloat16"))
    model = opened.build(opened.source)
    assert isinstance(model, Decoder)
    mixture = model.layers[1].mlp
    assert isinstance(mixture, Mixture) and mixture.experts.choice.bias_X is not None
    assert torch.equal(mixture.experts.choice.bias_X, bias)


def test_prediction_layers_are_ignored(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Do not read the layers after the last that predict further tokens, as many as the config says."""
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(4, 8), "model.layers.2.enorm.weight": torch.zeros(4)}
    path = copy_of(checkpoints["deepseek-v3"], tmp_path / "more", {"num_nextn_predict_layers": 1}, extra)
    assert run_chunks(make_backend(path), scattered_blocks(33, seed=5), [LENGTH]).isfinite().all()
    copy_of(path, tmp_path / "none", {"num_nextn_predict_layers": 0}, {})
    with pytest.raises(ValueError, match=r"tensors that the model does not use: model.layers.2.eh_proj.weight"):
        make_backend(tmp_path / "none")


def test_defaults() -> None:
    """Give absent entries the defaults of transformers, which are those of one model only where it has them."""
    sizes = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 2048, "num_experts_per_tok": 2, "n_routed_experts": 16,
    }  # fmt: skip
    for architecture, dense, shared, factor in (("DeepseekV2", 0, 2 * 1407, 1.0), ("DeepseekV3", 3, 2048, 2.5)):
        data = {"architectures": [f"{architecture}ForCausalLM"], **sizes}
        config = find_family(data).parse(data)
        assert config.latent is not None and config.moe is not None
        assert attrs.astuple(config.latent) == (512, 1536, 128, 64, 128, 1e-6)
        assert (len(config.moe.dense_layers), config.moe.shared_intermediate_size) == (dense, shared)
        assert config.moe.choice.factor == factor
