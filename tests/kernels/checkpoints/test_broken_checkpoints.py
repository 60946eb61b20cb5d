"""A checkpoint that is cut off, lies, does not fit its config or is not finite is refused by the tensor's name.

On both backends: they read through the same source, and each must let its refusals through.
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
from tests.kernels.kernel_checkpoints import backend_config, make_backend, make_batch, prompt, scattered_blocks

EXECUTORS = [pytest.param("cpu", marks=needs_kernels), "reference"]


@pytest.fixture
def folder(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "llama"))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("way", BREAKS)
def test_refused_by_the_tensor_s_name(folder: Path, way: str, executor: str) -> None:
    """Whatever is broken: a ValueError that says which tensor, or which file where no tensor can be told."""
    BREAKS[way].spoil(folder)
    with pytest.raises(ValueError, match=BREAKS[way].named):
        load_backend(executor, backend_config(folder))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_too_large_for_the_dtype_asked_for(folder: Path, executor: str) -> None:
    """A number that rounding makes infinite is refused, too, as what it was and what it was to be."""
    change_tensors(lambda tensors: tensors[UP].__setitem__((0, 0), 3.4e38))(folder)
    load_backend(executor, backend_config(folder, dtype="float32"))
    with pytest.raises(ValueError, match=rf"{UP} has a value that is not finite as bfloat16: 3.4\S+ at \(0, 0\)"):
        load_backend(executor, backend_config(folder, dtype="bfloat16"))


@needs_kernels
def test_float16_on_the_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype that the kernels do not have is refused by name; left to itself the choice is the reference."""
    with pytest.raises(ValueError, match="dtype float16 is neither bfloat16 nor float32"):
        load_backend("cpu", backend_config(folder, dtype="float16"))
    monkeypatch.setattr(availability, "why_unavailable", lambda: "no GPU in these tests")  # one would run it
    capabilities = load_backend("auto", backend_config(folder, dtype="float16")).capabilities
    assert (capabilities.name, capabilities.dtype) == ("reference", "float16")


@pytest.mark.parametrize("determinism", ["auto", "strict", "fast"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_determinism_says_what_runs(folder: Path, executor: str, determinism: str) -> None:
    """Strict is free on both, so it runs whichever is asked for; a mode that does not exist is refused."""
    capabilities = load_backend(executor, backend_config(folder, determinism=determinism)).capabilities
    assert (capabilities.determinism, capabilities.strict_is_free) == ("strict", True)
    with pytest.raises(ValueError, match="'loose'"):
        load_backend(executor, backend_config(folder, determinism="loose"))


def test_who_wants_strict() -> None:
    """`auto` is strict where that is free; the two others are what they say."""
    assert wants_strict("auto", strict_is_free=True) and not wants_strict("auto", strict_is_free=False)
    assert wants_strict("strict", strict_is_free=False) and not wants_strict("fast", strict_is_free=True)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_large_and_small_numbers_are_finite(folder: Path, executor: str) -> None:
    """The largest number of its dtype, the smallest, and both zeros are nothing to refuse."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        limits = torch.finfo(torch.float32)
        tensors[UP][0, :5] = torch.tensor([limits.max, limits.min, limits.tiny / 8, 0.0, -0.0])

    change_tensors(change)(folder)
    load_backend(executor, backend_config(folder))


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says is said, with the file's name."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder / "model.safetensors"))

    monkeypatch.setattr("quipu.kernels.checkpoints.files.mmap.mmap", refuse)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_backend("reference", backend_config(folder))


def logits_of(folder: Path) -> torch.Tensor:
    row = make_batch({"token_ids": prompt(40, seed=1), "position": 0, "blocks": scattered_blocks(3, seed=1)})
    return make_backend(folder).logits(row, [39])


def test_bytes_that_are_not_aligned(folder: Path) -> None:
    """The format aligns nothing: tensors whose bytes begin anywhere are read as any other."""
    expected = logits_of(folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    assert torch.equal(logits_of(folder), expected)


def test_same_weights_from_one_file_and_from_shards(folder: Path) -> None:
    """However a checkpoint is cut into files, the model is the same."""
    expected = logits_of(folder)
    in_two(folder)
    assert torch.equal(logits_of(folder), expected)
