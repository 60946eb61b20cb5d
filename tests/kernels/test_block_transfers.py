"""Blocks that are read to the host and written elsewhere: a prompt continues from them with the bits of a cold run."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from quipu.kernels.backend import Backend
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.fake import FakeBackend
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import FORMATS, backend_config, make_backend
from tests.kernels.one_prompt import LENGTH, TOKENS, run_chunks
from tests.kernels.step_batches import make_batch, scattered_blocks

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


CASES = [*(("qwen3-odd", numbers) for numbers in FORMATS), ("gemma4", "bfloat16"), ("gemma4", "int8-kv")]
"""Checkpoints and formats; the layers of the second have different heads."""


@pytest.mark.parametrize(("name", "numbers"), CASES)
@pytest.mark.parametrize("make", MAKERS)
def test_prompt_goes_on(checkpoints: dict[str, Path], make: Callable[..., Any], name: str, numbers: str) -> None:
    """Match a cold run on blocks that an equal backend has computed, and on those that were written back."""
    first, second = (make(checkpoints[name], **FORMATS[numbers]) for _ in range(2))
    blocks, others = scattered_blocks(33, seed=5), scattered_blocks(33, seed=6)
    cold = run_chunks(first, blocks, [LENGTH])
    for source, theirs, target in ((first, blocks, second), (second, others, first)):
        target.cache.fill(float("nan"))
        move(source, theirs, target, others)
        rest = {"token_ids": TOKENS[WHOLE:], "position": WHOLE, "blocks": others}
        wanted = list(range(LENGTH - WHOLE))
        assert torch.equal(target.logits(make_batch(rest), wanted), cold[-len(wanted) :])


def cache_of(backend: CpuBackend | FakeBackend) -> memoryview:
    """Map a backend's cache as another process would: to read it."""
    descriptor = backend.cache_descriptor
    assert descriptor is not None
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ))


@needs_kernels
@pytest.mark.parametrize(("name", "numbers"), CASES)
def test_prompt_goes_on_from_another_cache(checkpoints: dict[str, Path], name: str, numbers: str) -> None:
    """Match a cold run on blocks that were copied from the cache of an equal backend, of another size."""
    first, second = (
        make_cpu_backend(checkpoints[name], shares_cache=True, **{**FORMATS[numbers], "num_blocks": size})
        for size in (160, 200)
    )
    draw = random.Random(5).sample
    blocks = [*range(100, 112), *draw(range(1, 100), 21)]  # some of them in a row at both ends, some at one
    others = [*draw(range(1, 100), 4), *range(120, 136), *draw(range(140, 200), 13)]
    cold = run_chunks(first, blocks, [LENGTH])
    second.cache.fill(float("nan"))
    before = [tensor.clone() for tensor in second.cache.tensors]
    num_full = LENGTH // 16
    second.copy_from(cache_of(first), blocks[:num_full], others[:num_full])
    rest = {"token_ids": TOKENS[WHOLE:], "position": WHOLE, "blocks": others}
    for tensor, old in zip(second.cache.tensors, before, strict=True):
        changed = {block for block in range(len(tensor)) if not equal(tensor[block], old[block])}
        assert changed == set(others[:num_full])
    wanted = list(range(LENGTH - WHOLE))
    assert torch.equal(second.logits(make_batch(rest), wanted), cold[-len(wanted) :])
    cache = cache_of(first)
    for sources, targets in (([160], [1]), ([-1], [1]), ([1], [200]), ([1], [-1])):
        with pytest.raises(ValueError, match="no such blocks"):
            second.copy_from(cache, sources, targets)
    with pytest.raises(ValueError, match="no such blocks"):
        second.copy_from(cache[:-1], [1], [1])


def test_cache_that_nobody_else_writes(tmp_path: Path) -> None:
    """A cache is shared only if the config says so; others can neither write to it nor change its size, and what was
    mapped stays when its owner has closed it."""
    assert FakeBackend(backend_config(tmp_path)).cache_descriptor is None
    backend = FakeBackend(attrs.evolve(backend_config(tmp_path), shares_cache=True))
    descriptor = backend.cache_descriptor
    assert descriptor is not None
    size = os.fstat(descriptor).st_size
    for wrong in (size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.truncate(descriptor, wrong)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, size)
    backend.step(make_batch({"token_ids": TOKENS[:16], "position": 0, "blocks": [3]}))
    cache, held = cache_of(backend), backend.blocks.of(3)
    backend.close()
    assert backend.cache_descriptor is None
    del backend
    other = FakeBackend(backend_config(tmp_path))
    other.copy_from(cache, [3], [5])
    assert other.blocks.of(5) == held != [0] * 16


def test_no_memory_that_can_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no memory files, or no descriptor is left, the cache is in ordinary memory."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    backend = FakeBackend(attrs.evolve(backend_config(tmp_path), shares_cache=True))
    assert backend.cache_descriptor is None
    assert backend.step(make_batch({"token_ids": TOKENS[:16], "position": 0, "blocks": [3]})).token_ids


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
