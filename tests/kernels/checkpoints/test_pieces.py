"""Tensors read a few rows at a time equal whole ones, wherever they are split; and the progress display."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quipu.kernels.checkpoints import progress, weights
from quipu.kernels.checkpoints.weights import PieceByPiece, open_weights

PARTS = [("a.weight", (7, 6)), ("b.weight", (1, 6)), ("c.weight", (20, 6))]


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in PARTS} | {
        "v.bias": torch.randn(50),
        "w.bias": torch.randn(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


def opened(folder: Path, dtype: str = "float32", held_in: torch.dtype | None = None) -> PieceByPiece:
    return open_weights(folder, {}, load_format="auto", dtype=dtype, held_in=held_in)[0]


@pytest.mark.parametrize("piece_bytes", [1, 24, 100, 240, 4 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_equal_whole_tensors(
    tmp_path: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, piece_bytes: int, dtype: str
) -> None:
    """Concatenate fused parts for any size of piece; every piece but the last is a multiple of the requested rows."""
    monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
    rounded = getattr(torch, dtype)
    expected = torch.cat([stored[name] for name, _ in PARTS]).to(rounded)
    source = opened(tmp_path, dtype)
    assert torch.equal(source.fused(PARTS), expected)
    for multiple in (1, 4, 16):
        pieces = [piece.clone() for piece in source.pieces(PARTS, multiple=multiple)]
        assert all(len(piece) % multiple == 0 for piece in pieces[:-1])
        assert torch.equal(torch.cat(pieces), expected)
    assert torch.equal(source.tensor("v.bias", (50,)), stored["v.bias"].to(rounded))
    assert torch.equal(
        source.fused([("v.bias", (50,)), ("w.bias", (3,))]), torch.cat([stored["v.bias"], stored["w.bias"]]).to(rounded)
    )


def test_rounding_and_storage_dtypes_differ(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Round to bfloat16 but store float32, as the reference does."""
    source = opened(tmp_path, "bfloat16", torch.float32)
    whole = source.fused(PARTS)
    assert whole.dtype == torch.float32
    assert torch.equal(whole, torch.cat([stored[name] for name, _ in PARTS]).bfloat16().float())
    assert source.num_bytes == whole.nbytes


def test_dummy_weights_do_not_depend_on_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate the same dummy weights wherever tensors are split."""
    source = open_weights(tmp_path, {}, load_format="dummy", dtype="bfloat16")[0]
    parts = [("a.weight", (70, 999)), ("b.weight", (30, 999))]
    whole = source.fused(parts)
    monkeypatch.setattr(weights, "PIECE_BYTES", 9_000)
    assert torch.equal(torch.cat([piece.clone() for piece in source.pieces(parts, multiple=4)]), whole)


def test_progress_in_the_log(
    tmp_path: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If stderr is not a terminal, log progress periodically and at the end, without a bar."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, "quipu.kernels")
    source = opened(tmp_path)
    num_bytes = sum(tensor.nbytes for tensor in stored.values())
    for name, tensor in stored.items():
        source.tensor(name, tuple(tensor.shape))
    source.check_all_used()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"loading weights: {100 * stored['a.weight'].nbytes // num_bytes} % of {num_bytes} bytes"
    assert said[-2] == f"loading weights: 100 % of {num_bytes} bytes"
    assert said[-1].startswith(f"weights are loaded: {num_bytes} bytes in ")
    assert sys.stderr.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_progress_on_a_terminal(
    tmp_path: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Show a bar on a terminal, and clear it before any other output."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    source = opened(tmp_path)
    if fails:
        with pytest.raises(ValueError, match=r"a\.weight has shape"):
            source.tensor("a.weight", (6, 7))
    else:
        for name, tensor in stored.items():
            source.tensor(name, tuple(tensor.shape))
        source.check_all_used()
    shown = sys.stderr.getvalue()
    assert "loading weights" in shown
    assert shown.endswith("\r"), "the bar was not cleared"
