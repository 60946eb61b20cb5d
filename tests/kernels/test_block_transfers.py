"""Blocks that are read to the host and written elsewhere: a prompt continues from them with the bits of a cold run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quipu.kernels.backend import Backend
from quipu.kernels.fake import FakeBackend
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import FORMATS, backend_config, make_backend, make_batch, scattered_blocks
from tests.kernels.one_prompt import LENGTH, TOKENS, run_chunks

WHOLE = LENGTH // 16 * 16
MAKERS: list[Any] = [
    pytest.param(make_cpu_backend, marks=needs_kernels, id="cpu"),
    pytest.param(make_backend, id="reference"),
]


def move(source: Backend, blocks: list[int], target: Backend, others: list[int]) -> None:
    """Copy blocks of one backend to others of another one, by way of the host."""
    host = source.allocate_on_host(len(blocks))
    source.read_blocks(blocks, host)
    target.write_blocks(others, host)


@pytest.mark.parametrize("numbers", FORMATS)
@pytest.mark.parametrize("make", MAKERS)
def test_prompt_goes_on(checkpoints: dict[str, Path], make: Callable[..., Any], numbers: str) -> None:
    """Match a cold run on blocks that an equal backend has computed, and on those that were written back."""
    first, second = (make(checkpoints["qwen3-odd"], **FORMATS[numbers]) for _ in range(2))
    blocks, others = scattered_blocks(33, seed=5), scattered_blocks(33, seed=6)
    cold = run_chunks(first, blocks, [LENGTH])
    for source, theirs, target in ((first, blocks, second), (second, others, first)):
        target.cache.fill(float("nan"))
        move(source, theirs, target, others)
        rest = {"token_ids": TOKENS[WHOLE:], "position": WHOLE, "blocks": others}
        wanted = list(range(LENGTH - WHOLE))
        assert torch.equal(target.logits(make_batch(rest), wanted), cold[-len(wanted) :])


@pytest.mark.parametrize("make", MAKERS)
def test_only_what_is_named(checkpoints: dict[str, Path], make: Callable[..., Any]) -> None:
    """Other blocks keep what they hold, and memory of another size is refused before anything is copied."""
    backend = make(checkpoints["qwen3-odd"], **FORMATS["bfloat16"])
    run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    before = [tensor.clone() for tensor in backend.cache.tensors]
    host = backend.allocate_on_host(2)
    for wrong in ([7], [7, 8, 9]):
        with pytest.raises(ValueError, match="blocks of"):
            backend.write_blocks(wrong, host)
        with pytest.raises(ValueError, match="blocks of"):
            backend.read_blocks(wrong, host)
    source = backend.allocate_on_host(2)
    backend.read_blocks([7, 8], source)
    backend.write_blocks([9, 10], source)
    for tensor, old in zip(backend.cache.tensors, before, strict=True):
        same = [block for block in range(len(tensor)) if equal(tensor[block], old[block])]
        assert set(range(len(tensor))) - set(same) <= {9, 10}
        assert equal(tensor[9], old[7]) and equal(tensor[10], old[8])


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes: NaN equals itself."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_fake_blocks(tmp_path: Path) -> None:
    """The fake backend draws from blocks that were written back what it draws from those that it computed."""
    backend = FakeBackend(backend_config(tmp_path))
    blocks, others = [3, 9, 4], [11, 12, 13]
    cold = backend.step(make_batch({"token_ids": TOKENS[:40], "position": 0, "blocks": blocks}))
    move(backend, blocks[:2], backend, others[:2])
    rest = make_batch({"token_ids": TOKENS[32:40], "position": 32, "blocks": others})
    assert backend.step(rest).token_ids == cold.token_ids
    move(backend, [20], backend, [11])  # which no pass has written
    with pytest.raises(RuntimeError, match="no pass has written"):
        backend.step(rest)
    with pytest.raises(ValueError, match="slots of 8"):
        backend.read_blocks([1], backend.allocate_on_host(2))
