"""Checkpoints that are truncated, inconsistent, contradict their config or are not finite are refused by tensor name.

On both backends: they share the code that reads tensors, and each must report its errors.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from quipu.kernels.backend import wants_strict
from quipu.kernels.load import load_backend
from quipu.kernels.triton import availability
from tests.kernels.checkpoints.broken_checkpoints import BREAKS, UP, change_tensors, in_two
from tests.kernels.cpu.cpu_backends import needs_kernels
from tests.kernels.kernel_checkpoints import backend_config, make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

EXECUTORS = [pytest.param("cpu", marks=needs_kernels), "reference"]


@pytest.fixture
def folder(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "llama"))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", BREAKS)
def test_refusal_names_the_tensor(folder: Path, name: str, executor: str) -> None:
    """Raise a ValueError that names the tensor, or the file if no tensor can be named."""
    BREAKS[name].spoil(folder)
    with pytest.raises(ValueError, match=BREAKS[name].named):
        load_backend(executor, backend_config(folder))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_overflow_in_requested_dtype(folder: Path, executor: str) -> None:
    """Refuse a number that becomes infinite when rounded, naming the number and the dtype."""
    change_tensors(lambda tensors: tensors[UP].__setitem__((0, 0), 3.4e38))(folder)
    load_backend(executor, backend_config(folder, dtype="float32"))
    with pytest.raises(ValueError, match=rf"{UP} has a value that is not finite as bfloat16: 3.4\S+ at \(0, 0\)"):
        load_backend(executor, backend_config(folder, dtype="bfloat16"))


@needs_kernels
def test_float16_on_the_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a dtype that the kernels do not support, by name; `auto` chooses the reference instead."""
    with pytest.raises(ValueError, match="dtype float16 is neither bfloat16 nor float32"):
        load_backend("cpu", backend_config(folder, dtype="float16"))
    monkeypatch.setattr(availability, "why_unavailable", lambda: "no GPU in these tests")  # a GPU would be chosen
    capabilities = load_backend("auto", backend_config(folder, dtype="float16")).capabilities
    assert (capabilities.name, capabilities.dtype) == ("reference", "float16")


@pytest.mark.parametrize("determinism", ["auto", "strict", "fast"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_determinism_says_what_runs(folder: Path, executor: str, determinism: str) -> None:
    """Run strict whatever is requested, since it is free on both; refuse an unknown mode."""
    capabilities = load_backend(executor, backend_config(folder, determinism=determinism)).capabilities
    assert capabilities.determinism == "strict"
    with pytest.raises(ValueError, match="'loose'"):
        load_backend(executor, backend_config(folder, determinism="loose"))


def test_wants_strict() -> None:
    """Choose strict for `auto` if that is free; `strict` and `fast` are taken literally."""
    assert wants_strict("auto", strict_is_free=True) and not wants_strict("auto", strict_is_free=False)
    assert wants_strict("strict", strict_is_free=False) and not wants_strict("fast", strict_is_free=True)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_large_and_small_numbers_are_finite(folder: Path, executor: str) -> None:
    """Accept the largest and the smallest number of the dtype, and both zeros."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        limits = torch.finfo(torch.float32)
        tensors[UP][0, :5] = torch.tensor([limits.max, limits.min, limits.tiny / 8, 0.0, -0.0])

    change_tensors(change)(folder)
    load_backend(executor, backend_config(folder))


def test_unreadable_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report the system's error with the file's name."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder / "model.safetensors"))

    monkeypatch.setattr("quipu.kernels.checkpoints.files.mmap.mmap", refuse)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_backend("reference", backend_config(folder))


def logits_of(folder: Path) -> torch.Tensor:
    row = make_batch({"token_ids": prompt(40, seed=1), "position": 0, "blocks": scattered_blocks(3, seed=1)})
    return make_backend(folder).logits(row, [39])


def test_bytes_that_are_not_aligned(folder: Path) -> None:
    """Read unaligned tensors like all others: the format guarantees no alignment."""
    expected = logits_of(folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    assert torch.equal(logits_of(folder), expected)


def test_same_weights_from_one_file_and_from_shards(folder: Path) -> None:
    """Load the same model however a checkpoint is sharded."""
    expected = logits_of(folder)
    in_two(folder)
    assert torch.equal(logits_of(folder), expected)
