"""`--quantization`: what is quantized, how its pieces fit together, and that every reader of weights sees the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quipu.kernels.checkpoints import weights
from quipu.kernels.checkpoints.fused_rows import common_layout, concatenate
from quipu.kernels.checkpoints.quantized import QuantizedLayout, QuantizedRows, quantize
from quipu.kernels.checkpoints.weights import PieceByPiece, open_weights
from tests.kernels.kernel_checkpoints import backend_config, make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
ROUTER, NORM, EMBED = "model.layers.0.mlp.gate.weight", "model.norm.weight", "model.embed_tokens.weight"
SHAPES = {Q: (40, 64), K: (24, 64), ROUTER: (8, 64), NORM: (64,), EMBED: (50, 64)}
FUSED = [(Q, SHAPES[Q]), (K, SHAPES[K])]


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


def opened(folder: Path, quantization: str, load_format: str = "auto") -> PieceByPiece:
    return open_weights(folder, {}, load_format=load_format, dtype="bfloat16", quantization=quantization)[0]


def collected(source: PieceByPiece, parts: list[tuple[str, tuple[int, ...]]], multiple: int = 4) -> torch.Tensor:
    pieces = [rows.dequantized() for rows in source.quantized_pieces(parts, multiple=multiple)]
    assert all(len(piece) % multiple == 0 for piece in pieces[:-1])
    return torch.cat(pieces)


@pytest.mark.parametrize(("name", "bits", "group"), [("int8", 8, 64), ("int4", 4, 32), ("int4-g32", 4, 32)])
def test_what_is_quantized(tmp_path: Path, stored: dict[str, torch.Tensor], name: str, bits: int, group: int) -> None:
    """Quantize linear matrices as requested and the embedding to int8 a row; leave routers and norms as they are."""
    source = opened(tmp_path, name)
    assert source.quantized(FUSED) == QuantizedLayout(bits, group, has_offsets=False)
    assert source.quantized([(EMBED, SHAPES[EMBED])]) == QuantizedLayout(8, 64, has_offsets=False)
    assert source.quantized([(ROUTER, SHAPES[ROUTER])]) is None
    assert source.format == ("int8" if name == "int8" else "int4-g32")
    assert torch.equal(source.tensor(ROUTER, SHAPES[ROUTER]), stored[ROUTER])
    assert torch.equal(source.tensor(NORM, SHAPES[NORM]), stored[NORM])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("piece", [1, 64 * 7, 1 << 18])
def test_pieces_are_rows_of_the_whole(
    tmp_path: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, piece: int, load_format: str
) -> None:
    """Quantize each row alike in pieces of any size; the plain numbers are the same, rounded."""
    source = opened(tmp_path, "int4", load_format)
    layout = source.quantized(FUSED)
    assert layout is not None
    monkeypatch.setattr(weights, "QUANTIZED_PIECE", piece)
    whole = collected(source, FUSED)
    if load_format == "auto":
        assert torch.equal(whole, quantize(torch.cat([stored[Q], stored[K]]), layout).dequantized())
    assert torch.equal(source.fused(FUSED), whole.bfloat16())
    assert torch.equal(torch.cat([p.clone() for p in source.pieces(FUSED, multiple=4)]), whole.bfloat16())
    source.check_all_used(ignore=frozenset(SHAPES))


def test_groups_that_do_not_divide_rows(
    tmp_path: Path, stored: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Leave matrices plain whose rows the groups do not divide, and warn by name; a fused matrix is then plain."""
    source = opened(tmp_path, "int4-g128")
    assert source.quantized(FUSED) is None
    assert source.quantized([(EMBED, SHAPES[EMBED])]) is not None
    assert torch.equal(source.fused(FUSED), torch.cat([stored[Q], stored[K]]))
    assert f"2 matrices are not quantized, because groups of 128 do not divide their rows: {K}, {Q}" in caplog.text
    assert source.format == "bfloat16"


def test_unknown_quantization(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Refuse a value that `--quantization` does not know, by its name."""
    with pytest.raises(ValueError, match="unknown quantization 'int3'"):
        opened(tmp_path, "int3")


def test_expected_bytes(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Say before loading what quantized weights will take, and what they take if they are dequantized."""
    source = opened(tmp_path, "int4")
    assert source.expected_bytes == 2 * sum(tensor.numel() for tensor in stored.values())
    linear = 64 * 64 // 2 + 64 * 64 // 32 * 2
    assert source.expected_quantized_bytes == linear + 50 * 64 + 50 * 2 + 2 * (8 * 64 + 64)


def test_parts_of_different_layouts() -> None:
    """Represent fused parts of different bits, groups and offsets in one layout that changes no number."""
    torch.manual_seed(1)
    narrow = QuantizedRows(
        torch.randint(-8, 8, (3, 64), dtype=torch.int8),
        torch.rand(3, 2),
        torch.randint(-8, 8, (3, 2), dtype=torch.int8),
        torch.rand(3, 2),
    )
    wide = QuantizedRows(torch.randint(-32, 32, (2, 64), dtype=torch.int8), torch.rand(2, 4))
    layout = common_layout([QuantizedLayout(4, 32, has_offsets=True), QuantizedLayout(8, 16, has_offsets=False)])
    assert layout == QuantizedLayout(8, 16, has_offsets=True)
    both = concatenate([narrow, wide], layout)
    assert both.group_size == 16
    assert torch.equal(both.dequantized(), torch.cat([narrow.dequantized(), wide.dequantized()]))
    assert concatenate([wide, wide], layout).zeros_OG is None
    assert common_layout([layout, None]) is None


def test_dummies_are_drawn(tmp_path: Path) -> None:
    """Draw dummy codes of each name over their whole range, with the deviation of plain dummies."""
    source = opened(tmp_path, "int4", "dummy")
    parts = [(Q, (300, 640))]
    (rows,) = source.quantized_pieces(parts, multiple=4)
    assert rows.codes_OI.unique().tolist() == list(range(-7, 8))
    assert rows.dequantized().std() == pytest.approx(0.02, rel=0.2)
    other = collected(source, [(K, (300, 640))])
    assert not torch.equal(collected(source, parts), other)


def test_reference_serves_quantized_weights(checkpoints: dict[str, Path]) -> None:
    """Compute with the dequantized numbers on a backend that has no kernels for them, and report their format."""
    row = make_batch({"token_ids": prompt(20, seed=1), "position": 0, "blocks": scattered_blocks(2, seed=1)})
    plain = make_backend(checkpoints["llama"])
    int8 = make_backend(checkpoints["llama"], quantization="int8")
    assert (plain.capabilities.weights, int8.capabilities.weights) == ("float32", "int8")
    expected, found = plain.logits(row, [19]), int8.logits(row, [19])
    assert 0 < (expected - found).norm() / expected.norm() < 0.1


def test_reference_refuses_int8_activations(checkpoints: dict[str, Path]) -> None:
    """Refuse int8 activations where no kernel computes with them."""
    with pytest.raises(ValueError, match="reference executor has no kernels for int8 activations"):
        make_backend(checkpoints["llama"], activations="int8")
    assert backend_config(checkpoints["llama"]).activations == "auto"
