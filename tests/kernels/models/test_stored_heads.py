"""Checkpoints with an output head of their own, although their configurations say that it is the embedding."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.one_prompt import Backend
from tests.kernels.oracles import check, differences, run, run_transformers

MAKERS = [make_backend, pytest.param(make_cpu_backend, marks=needs_kernels)]


def with_head(checkpoint: Path, folder: Path, factor: float) -> Path:
    """Return a copy in which the head is the embedding, half of whose rows are multiplied."""
    copy = Path(shutil.copytree(checkpoint, folder))
    tensors = load_file(copy / "model.safetensors")
    head_VD = tensors["model.embed_tokens.weight"].clone()
    head_VD[::2] *= factor
    save_file({**tensors, "lm_head.weight": head_VD}, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("make", MAKERS)
def test_other_head(
    checkpoints: dict[str, Path], tmp_path: Path, make: Callable[..., Backend], caplog: pytest.LogCaptureFixture
) -> None:
    """Use the head that is stored, as transformers does, and say so."""
    folder = with_head(checkpoints["llama-rope3"], tmp_path / "model", 0.5)
    with caplog.at_level(logging.WARNING):
        found = run(make(folder, dtype="float32"))
    check("llama-rope3", "float32", differences(found, run_transformers(folder, "float32")))
    assert "lm_head.weight differs from the embedding" in caplog.text


@pytest.mark.parametrize("make", MAKERS)
def test_same_head(
    checkpoints: dict[str, Path], tmp_path: Path, make: Callable[..., Backend], caplog: pytest.LogCaptureFixture
) -> None:
    """Hold a head that equals the embedding once, and say nothing."""
    folder, plain = with_head(checkpoints["llama-rope3"], tmp_path / "model", 1.0), checkpoints["llama-rope3"]
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(make(folder, dtype="float32")), run(make(plain, dtype="float32")))
    assert not caplog.text
