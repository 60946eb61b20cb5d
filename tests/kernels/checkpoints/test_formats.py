"""Quantized safetensors checkpoints: each format's tensors equal, to the bit, what its own library makes of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quipu.actors.shared.checkpoint import read_info
from quipu.kernels.checkpoints import weights
from quipu.kernels.checkpoints.quantized import QuantizedLayout
from quipu.kernels.checkpoints.weights import PieceByPiece, open_weights
from tests.kernels.checkpoints.quantized_files import (
    AWQ_CONFIG,
    Tensors,
    compress,
    compressed_config,
    pack_awq,
    scheme_of,
    store_fp8,
)

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
EMBED = "model.embed_tokens.weight"
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": None,
}


def opened(folder: Path, config: dict[str, Any], stored: Tensors, dtype: str, **more: Any) -> PieceByPiece:
    save_file(stored, folder / "model.safetensors")
    return open_weights(folder, {"quantization_config": config}, load_format="auto", dtype=dtype, **more)[0]


def check_reads(source: PieceByPiece, parts: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the parts fused, whole and in small pieces, plain and quantized, and compare with what they must be."""
    names = [(f"{name}.weight", tuple(weight.shape)) for name, weight in parts.items()]
    expected = torch.cat(list(parts.values()))
    assert torch.equal(source.fused(names), expected)
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    assert torch.equal(source.fused(names), expected)
    monkeypatch.setattr(weights, "QUANTIZED_PIECE", 1000)
    if source.quantized(names) is not None:
        pieces = [rows.dequantized() for rows in source.quantized_pieces(names, multiple=3)]
        assert len(pieces) > 2
        assert torch.equal(torch.cat(pieces).to(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("form", "bits", "group_size", "symmetric"),
    [
        ("pack-quantized", 4, 32, True),
        ("pack-quantized", 4, 8, False),
        ("pack-quantized", 4, None, True),
        ("pack-quantized", 8, 16, False),
        ("int-quantized", 8, None, True),
        ("int-quantized", 8, None, False),
    ],
)
def test_compressed_tensors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    dtype: torch.dtype,
) -> None:
    """Equal what the `compressed-tensors` package decompresses, symmetric or not, for any width."""
    torch.manual_seed(bits)
    scheme = scheme_of(bits, group_size, symmetric=symmetric)
    width = 96 if group_size else 91
    (q, q_weight), (k, k_weight) = (compress(name, (n, width), scheme, form, dtype) for name, n in ((Q, 41), (K, 20)))
    name = str(dtype).removeprefix("torch.")
    source = opened(tmp_path, compressed_config(scheme, form), {**q, **k, "model.norm.weight": torch.ones(8)}, name)
    layout = QuantizedLayout(bits, group_size or width, has_offsets=not symmetric)
    assert source.quantized([(f"{Q}.weight", (41, width))]) == layout
    check_reads(source, {Q: q_weight, K: k_weight}, monkeypatch)
    assert source.activations is None
    group = f"-g{group_size}" if group_size else ""
    assert source.format == f"int{bits}{group}{'' if symmetric else '-asym'}"
    source.tensor("model.norm.weight", (8,))
    source.check_all_used()


def test_int8_activations_are_suggested(tmp_path: Path) -> None:
    """Say of a W8A8 checkpoint that it was made for int8 activations."""
    scheme = scheme_of(8, None, symmetric=True, int8_inputs=True)
    stored, _ = compress(Q, (16, 32), scheme, "int-quantized", torch.bfloat16)
    source = opened(tmp_path, compressed_config(scheme, "int-quantized"), stored, "bfloat16")
    assert source.activations == "int8"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("format", "nvfp4-pack-quantized", "format 'nvfp4-pack-quantized' is not supported"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is not supported"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config is not supported"),
        ("weights.type", "float", "weights.type 'float' is not supported"),
        ("weights.num_bits", 3, "weights.num_bits 3 is not supported"),
        ("weights.strategy", "block", "weights.strategy 'block' is not supported"),
        ("weights.actorder", "group", "weights.actorder 'group' is not supported"),
        ("weights.group_size", 0, "weights.group_size is 0"),
        ("input_activations", {"type": "int", "num_bits": 8, "strategy": "token", "symmetric": True}, "dynamic None"),
        ("input_activations", {"type": "float", "num_bits": 8}, "input_activations.type 'float' is not supported"),
        ("output_activations", {}, "output_activations is not supported"),
        ("weights.group_size", 16, f"tensor {Q}.weight_packed .* agree with no group"),
        ("weights.symmetric", False, f"tensor {Q}.weight_packed .* agree with no group"),
        ("config_groups", [], "config_groups must be an object"),
    ],
)
def test_unsupported_compressed_tensors(tmp_path: Path, path: str, value: Any, named: str) -> None:
    """Refuse by name every part of the format that would be computed incorrectly."""
    scheme = scheme_of(4, 32, symmetric=True)
    stored, _ = compress(Q, (8, 64), scheme, "pack-quantized", torch.bfloat16)
    config = compressed_config(scheme, "pack-quantized")
    group = config["config_groups"]["group_0"]
    first, _, rest = path.partition(".")
    owner = group["weights"] if rest else group if path.endswith("_activations") else config
    owner[rest or first] = value
    with pytest.raises(ValueError, match=named):
        opened(tmp_path, config, stored, "bfloat16")


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    """Refuse the order of GPTQ's activations, which no layout here has."""
    scheme = scheme_of(4, 32, symmetric=True)
    stored, _ = compress(Q, (8, 64), scheme, "pack-quantized", torch.bfloat16)
    stored[f"{Q}.weight_g_idx"] = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="weight_g_idx"):
        opened(tmp_path, compressed_config(scheme, "pack-quantized"), stored, "bfloat16")


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape"])
def test_missing_parts(tmp_path: Path, part: str) -> None:
    """Name the tensor that a quantized module lacks."""
    scheme = scheme_of(4, 32, symmetric=True)
    stored, _ = compress(Q, (8, 64), scheme, "pack-quantized", torch.bfloat16)
    del stored[f"{Q}.{part}"]
    with pytest.raises(ValueError, match=f"lacks tensor {Q}.{part}"):
        opened(tmp_path, compressed_config(scheme, "pack-quantized"), stored, "bfloat16")


def test_awq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal the format's own arithmetic in float16, for codes and zeros in AutoAWQ's order."""
    torch.manual_seed(0)
    (q, q_weight), (k, k_weight) = pack_awq(Q, (40, 64)), pack_awq(K, (24, 64))
    source = opened(tmp_path, AWQ_CONFIG, q | k, "float16")
    assert source.quantized([(f"{Q}.weight", (40, 64))]) == QuantizedLayout(4, 16, has_offsets=True)
    check_reads(source, {Q: q_weight, K: k_weight}, monkeypatch)
    assert source.format == "int4-g16-asym"
    source.check_all_used()


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "bfloat16"), ("float16", "float16"), ("float32", "float32")])
def test_dtype_of_quantized_float16(tmp_path: Path, dtype: str, expected: str) -> None:
    """Serve a quantized checkpoint in float16 as bfloat16 unless asked otherwise, in web process and engine alike."""
    sizes = {"vocab_size": 10, "max_position_embeddings": 20}
    config = {"quantization_config": AWQ_CONFIG, "torch_dtype": "float16", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(pack_awq(Q, (8, 32))[0], tmp_path / "model.safetensors")
    _, found = open_weights(tmp_path, config, load_format="auto", dtype=dtype)
    assert str(found) == f"torch.{expected}"
    assert read_info(tmp_path, dtype=dtype).dtype == expected


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_dtype_of_float16_that_is_quantized(tmp_path: Path, quantization: str | None) -> None:
    """A plain checkpoint in float16 that is quantized while loading is bfloat16, too: no CPU computes in float16."""
    config = {"dtype": "float16", "vocab_size": 10, "max_position_embeddings": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({f"{Q}.weight": torch.zeros(8, 32, dtype=torch.float16)}, tmp_path / "model.safetensors")
    _, found = open_weights(tmp_path, config, load_format="auto", dtype="auto", quantization=quantization)
    expected = "float16" if quantization is None else "bfloat16"
    assert str(found) == f"torch.{expected}" and read_info(tmp_path, quantization=quantization).dtype == expected


def test_groups_of_awq_as_configured(tmp_path: Path) -> None:
    """Refuse tensors whose groups differ from the configuration's."""
    tensors = pack_awq(Q, (8, 32))[0]
    width, num_groups = tensors[f"{Q}.qweight"].shape[0], tensors[f"{Q}.scales"].shape[0]
    opened(tmp_path, AWQ_CONFIG | {"group_size": width // num_groups}, tensors, "float16")
    with pytest.raises(ValueError, match=r"self_attn\.q_proj have groups of .*group_size is 7"):
        opened(tmp_path, AWQ_CONFIG | {"group_size": 7}, tensors, "float16")


@pytest.mark.parametrize(("entry", "value"), [("version", "gemv"), ("bits", 8), ("zero_point", False)])
def test_unsupported_awq(tmp_path: Path, entry: str, value: Any) -> None:
    """Refuse other layouts of AWQ by name."""
    with pytest.raises(ValueError, match=f"quantization_config.{entry} {value!r} is not supported"):
        opened(tmp_path, AWQ_CONFIG | {entry: value}, pack_awq(Q, (8, 32))[0], "float16")


def test_awq_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """Name the module whose tensors contradict each other."""
    stored, _ = pack_awq(Q, (8, 32))
    stored[f"{Q}.scales"] = stored[f"{Q}.scales"][:1]
    with pytest.raises(ValueError, match=f"tensors of {Q} do not fit each other"):
        opened(tmp_path, AWQ_CONFIG, stored, "float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: str) -> None:
    """Multiply each number with its block's factor in float32, round once, and say what that takes in memory."""
    torch.manual_seed(0)
    caplog.set_level(logging.INFO, "quipu.kernels")
    (q, q_weight), (k, k_weight) = store_fp8(Q, (200, 300)), store_fp8(K, (100, 300))
    source = opened(tmp_path, FP8_CONFIG, q | k, dtype)
    rounded = getattr(torch, dtype)
    check_reads(source, {Q: q_weight.to(rounded), K: k_weight.to(rounded)}, monkeypatch)
    assert source.quantized([(f"{Q}.weight", (200, 300))]) is None
    assert source.format == dtype
    assert f"2 matrices in FP8 (0.00 GiB) are read as {dtype}" in caplog.text


def test_fp8_in_one_block(tmp_path: Path) -> None:
    """A block that is larger than the matrix takes no more memory than the matrix."""
    stored, weight = store_fp8(Q, (100, 60))
    source = opened(tmp_path, FP8_CONFIG | {"weight_block_size": [10**9, 10**30]}, stored, "float32")
    assert torch.equal(source.fused([(f"{Q}.weight", (100, 60))]), weight)


def test_fp8_as_int8(tmp_path: Path) -> None:
    """Quantize FP8 to int8 if that is asked for, from the numbers that it would be read as."""
    torch.manual_seed(0)
    stored, weight = store_fp8(Q, (200, 300))
    source = opened(tmp_path, FP8_CONFIG, stored, "bfloat16", quantization="int8")
    (rows,) = source.quantized_pieces([(f"{Q}.weight", (200, 300))], multiple=4)
    assert source.format == "int8"
    error = (rows.dequantized() - weight.bfloat16().float()).abs()
    assert bool((error <= rows.scales_OG * 0.51).all())


@pytest.mark.parametrize(
    ("entry", "value"), [("activation_scheme", "static"), ("fmt", "e5m2"), ("weight_block_size", None)]
)
def test_unsupported_fp8(tmp_path: Path, entry: str, value: Any) -> None:
    """Refuse FP8 that needs activations in FP8, or has other scales."""
    with pytest.raises(ValueError, match=f"quantization_config.{entry} "):
        opened(tmp_path, FP8_CONFIG | {entry: value}, store_fp8(Q, (8, 32))[0], "bfloat16")


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", None, 7])
def test_other_methods_are_refused(tmp_path: Path, method: Any) -> None:
    """Refuse other formats by name, and configs that name none."""
    config = {"quant_method": method, "bits": 4}
    with pytest.raises(ValueError, match=f"quant_method {method!r} is not supported"):
        opened(tmp_path, config, {EMBED: torch.ones(2, 2)}, "bfloat16")


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    """Name the tensor whose scale is not finite, and where."""
    scheme = scheme_of(4, 32, symmetric=True)
    stored, _ = compress(Q, (8, 64), scheme, "pack-quantized", torch.bfloat16)
    stored[f"{Q}.weight_scale"][3, 1] = float("inf")
    source = opened(tmp_path, compressed_config(scheme, "pack-quantized"), stored, "bfloat16")
    with pytest.raises(ValueError, match=rf"{Q}.weight has a scale that is not finite at \(3, 1\)"):
        list(source.quantized_pieces([(f"{Q}.weight", (8, 64))], multiple=1))


def test_tables_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Quantize what a checkpoint has left plain, and leave alone what it has quantized."""
    scheme = scheme_of(4, 32, symmetric=True)
    stored, weight = compress(Q, (8, 64), scheme, "pack-quantized", torch.bfloat16)
    stored[EMBED] = torch.randn(10, 64).bfloat16()
    source = opened(tmp_path, compressed_config(scheme, "pack-quantized"), stored, "bfloat16", quantization="int8")
    assert source.quantized([(EMBED, (10, 64))]) == QuantizedLayout(8, 64, has_offsets=False)
    assert source.quantized([(f"{Q}.weight", (8, 64))]) == QuantizedLayout(4, 32, has_offsets=False)
    assert torch.equal(source.tensor(f"{Q}.weight", (8, 64)), weight)
