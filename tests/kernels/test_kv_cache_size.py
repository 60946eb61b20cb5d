"""The number of KV-cache blocks: given as a count, in bytes, as a share of memory, by default; and refusals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from quipu.kernels.backend import KVMemory, MemoryPlan
from quipu.kernels.kv_cache import BlockShape
from quipu.kernels.kv_cache_size import DeviceMemory, DraftMemory, check_weights_fit, plan_memory
from quipu.kernels.load import load_backend
from quipu.kernels.machine import Memory
from tests.kernels.cpu.cpu_backends import needs_kernels
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

MIB = 1 << 20
GIB = 1 << 30
EXECUTORS = [pytest.param("cpu", marks=needs_kernels), "reference"]


def pool_of(
    *,
    kv_memory: KVMemory | None = None,
    num_blocks: int | None = None,
    max_model_len: int = 1024,
    may_shorten: bool = False,
    total: int = 16 * GIB,
    available: int = 12 * GIB,
    default: KVMemory | None = None,
    num_sharing: int = 1,
    share: int | None = None,
    host_tier: int = 0,
    num_staged: int = 0,
    adapters: int = 0,
    draft: DraftMemory | None = None,
) -> MemoryPlan:
    """Plan a device with 2 GiB in use, where a block of 16 tokens takes 1 MiB and the largest pass 1 GiB."""
    config = backend_config(
        Path(),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        kv_memory=kv_memory or KVMemory(),
        may_shorten=may_shorten,
        num_sharing=num_sharing,
    )
    device = DeviceMemory(
        block_bytes=MIB,
        weights_bytes=GIB,
        held=2 * GIB,
        profile=lambda: GIB,
        memory=lambda: Memory(total, available),
        default=default or KVMemory(),
        share=share,
        host_tier=host_tier,
        num_staged=num_staged,
        adapters=adapters,
        draft=draft or DraftMemory(),
    )
    return plan_memory(config, device)


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"num_blocks": 77}, 77),
        ({"kv_memory": KVMemory(num_bytes=100 * MIB + 5)}, 100),
        ({"kv_memory": KVMemory(utilization=0.5)}, (8 - 2 - 1) * 1024),
        # the more specific of two settings wins, as in vLLM
        ({"num_blocks": 77, "kv_memory": KVMemory(100 * MIB, 0.5)}, 77),
        ({"kv_memory": KVMemory(100 * MIB, 0.5)}, 100),
        # by default: sixteen contexts and the null block, 4 GiB, a quarter of all memory, half of what is available
        ({}, 1 + 16 * 64),
        ({"max_model_len": 65_536}, 4096),
        ({"max_model_len": 65_536, "total": 8 * GIB}, 2048),
        ({"max_model_len": 65_536, "available": GIB}, 512),
        ({"default": KVMemory(utilization=0.9)}, int((16 * 0.9 - 3) * 1024)),
    ],
)
def test_number_of_blocks(settings: dict[str, Any], num_blocks: int) -> None:
    """An explicit setting takes precedence; a default never fills the machine."""
    assert pool_of(may_shorten=True, **settings).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        # half of what is left of the share, of which the process holds 2 GiB
        ({"num_sharing": 2, "share": 5 * GIB}, 1536),
        ({"num_sharing": 4, "share": 3 * GIB}, 512),
        # a quarter of all memory is divided, too
        ({"num_sharing": 4, "share": 16 * GIB, "total": 8 * GIB}, 512),
        # others have taken what the share promised
        ({"num_sharing": 2, "share": 5 * GIB, "available": GIB}, 512),
        ({"num_sharing": 2, "share": 5 * GIB, "kv_memory": KVMemory(utilization=0.5)}, (4 - 2 - 1) * 1024),
        # what is said in blocks or bytes is each engine's
        ({"num_sharing": 2, "share": 5 * GIB, "num_blocks": 77}, 77),
        ({"num_sharing": 2, "share": 5 * GIB, "kv_memory": KVMemory(num_bytes=3 * GIB)}, 3072),
    ],
)
def test_number_of_blocks_of_several_engines(settings: dict[str, Any], num_blocks: int) -> None:
    """Each of several engines keeps to its share, whatever the others have taken of theirs so far."""
    assert pool_of(may_shorten=True, max_model_len=65_536, **settings).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"available": 4 * GIB}, 1536),
        ({"num_sharing": 2, "share": 5 * GIB}, 1024),
        ({"kv_memory": KVMemory(utilization=0.5)}, (8 - 2 - 1 - 1) * 1024),
        ({"num_blocks": 77}, 77),
        ({"kv_memory": KVMemory(num_bytes=100 * MIB)}, 100),
    ],
)
def test_host_tier_in_the_same_memory(settings: dict[str, Any], num_blocks: int) -> None:
    """A size that is chosen leaves the host tier its memory; what is said in blocks or bytes stays."""
    assert pool_of(may_shorten=True, max_model_len=65_536, host_tier=GIB, **settings).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"available": 4 * GIB}, (4096 - 108) // 2),
        ({"available": 4 * GIB, "host_tier": GIB}, (3072 - 108) // 2),
        ({"num_sharing": 2, "share": 5 * GIB}, (3072 - 108) // 2),
        ({"kv_memory": KVMemory(utilization=0.5)}, (8 - 2 - 1) * 1024 - 108),
        ({"num_blocks": 77}, 77),
    ],
)
def test_buffers_of_other_tiers(settings: dict[str, Any], num_blocks: int) -> None:
    """A size that is chosen leaves room for the buffers through which blocks go to a disk or an object store."""
    assert pool_of(may_shorten=True, max_model_len=65_536, num_staged=108, **settings).num_blocks == num_blocks


@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_memory_beside_the_buffers(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """A cache for which the buffers leave too little is refused, by each backend on the CPU, and says why."""
    monkeypatch.setattr(f"quipu.kernels.{executor}.{executor}_backend.memory", lambda: Memory(8 * GIB, GIB))
    config = backend_config(checkpoints["llama"])
    block_bytes = load_backend(executor, config).memory_plan.block_bytes
    most = GIB // block_bytes
    with pytest.raises(ValueError, match=r"less [0-9.]+.iB for blocks on their way to other tiers: lower it"):
        load_backend(executor, attrs.evolve(config, num_staged_blocks=most))


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [({"available": 4 * GIB}, 1536), ({"kv_memory": KVMemory(utilization=0.5)}, (8 - 2 - 1 - 1) * 1024)],
)
def test_memory_of_adapters(settings: dict[str, Any], num_blocks: int) -> None:
    """Leave the memory that adapters will take once they are loaded, and say so."""
    assert pool_of(may_shorten=True, max_model_len=65_536, adapters=GIB, **settings).num_blocks == num_blocks
    with pytest.raises(ValueError, match=r"less 1.00GiB for adapters \(--max-loras\)"):
        pool_of(num_blocks=12 * 1024, adapters=GIB)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_memory_beside_the_host_tier(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """A cache that leaves the tier less than was asked for is refused with its flag, by each backend on the CPU."""
    monkeypatch.setattr(f"quipu.kernels.{executor}.{executor}_backend.memory", lambda: Memory(8 * GIB, GIB))
    assert load_backend(executor, backend_config(checkpoints["llama"], host_tier_bytes=GIB // 2))
    with pytest.raises(ValueError, match=r"0 of memory is available, less --kv-host-memory 1.00GiB: lower it"):
        load_backend(executor, backend_config(checkpoints["llama"], host_tier_bytes=GIB))


def test_shares_fit_together() -> None:
    """Whatever is free when each of them looks, the caches of several engines and the rest fit into what was free."""
    free = 12 * GIB
    for num_sharing in (2, 3, 5):
        for available in (free, 8 * GIB, 4 * GIB):
            plan = pool_of(
                num_sharing=num_sharing,
                share=free // num_sharing,
                available=available,
                max_model_len=65_536,
                may_shorten=True,
            )
            assert num_sharing * (2 * GIB + plan.num_blocks * MIB) <= free


def test_profile_runs_only_if_needed() -> None:
    """A pass is profiled only if the size depends on its memory."""
    assert pool_of(num_blocks=77, max_model_len=512).workspace_bytes is None
    assert pool_of(kv_memory=KVMemory(num_bytes=GIB)).workspace_bytes is None
    assert pool_of(kv_memory=KVMemory(utilization=0.9)).workspace_bytes == GIB
    assert pool_of().workspace_bytes == GIB


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"kv_memory": KVMemory(num_bytes=64 * MIB)},
            r"1024 tokens \(max_model_len\) needs 65.00MiB of KV cache, and --kv-cache-memory 64.00MiB gives 64.00MiB "
            r"\(64 blocks of 16 .*\): give it --kv-cache-memory 65.00MiB or more, or lower --max-model-len to 1008",
        ),
        ({"num_blocks": 3}, r"--num-blocks 3 gives 3.00MiB .* or lower --max-model-len to 32"),
        (
            {"kv_memory": KVMemory(utilization=0.1)},
            r"--gpu-memory-utilization 0.1 of 16.00GiB, less 2.00GiB held and 1.00GiB for the largest pass, gives 0 .*"
            r"--kv-cache-memory 65.00MiB or more$",
        ),
        ({"available": 100 * MIB}, "the default of 50.00MiB gives 50.00MiB"),
        (
            {"kv_memory": KVMemory(num_bytes=GIB), "available": GIB // 2},
            r"asks for 1.00GiB .* 512.00MiB of memory is available",
        ),
        (
            {"kv_memory": KVMemory(utilization=1.0), "available": 4 * GIB},
            r"asks for 13.00GiB .* 4.00GiB of memory is available",
        ),
        (
            {"kv_memory": KVMemory(num_bytes=4 * GIB), "num_sharing": 2, "share": 5 * GIB},
            r"asks for 4.00GiB .* 3.00GiB of memory is available for each of 2 engines \(--engines\): lower it",
        ),
        ({"num_sharing": 6, "share": 2 * GIB}, r"the default of 0 for each of 6 engines \(--engines\) gives 0"),
    ],
)
def test_refused(settings: dict[str, Any], named: str) -> None:
    """Refuse a size below one sequence of maximum length or above the memory; name the required size and the flag."""
    with pytest.raises(ValueError, match=named):
        pool_of(**settings)


def test_copies_of_weights() -> None:
    """Weights that fit once and not into each engine's share are refused, naming --engines."""
    memory = Memory(total=16 * GIB, available=12 * GIB)
    check_weights_fit(7 * GIB, memory)
    check_weights_fit(6 * GIB, memory, num_sharing=2, share=6 * GIB)
    with pytest.raises(ValueError, match=r"take 7.00GiB .* in each of 2 engines, and 6.00GiB of 16.00GiB .*--engines"):
        check_weights_fit(7 * GIB, memory, num_sharing=2, share=6 * GIB)
    with pytest.raises(ValueError, match=r"take 13.00GiB of memory, and 12.00GiB of 16.00GiB are available"):
        check_weights_fit(13 * GIB, memory)


def test_default_max_model_len_is_shortened(caplog: pytest.LogCaptureFixture) -> None:
    """Shorten a model's own length to fit into memory, with a warning, but not to less than a block."""
    caplog.set_level(logging.WARNING, "quipu.kernels")
    pool = pool_of(kv_memory=KVMemory(num_bytes=33 * MIB), may_shorten=True)
    assert (pool.num_blocks, pool.max_model_len) == (33, 512)
    assert "shortened to 512 of 1024 tokens" in caplog.text
    with pytest.raises(ValueError, match="--kv-cache-memory"):
        pool_of(kv_memory=KVMemory(num_bytes=MIB), may_shorten=True)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_backends_allocate_the_planned_blocks(checkpoints: dict[str, Path], executor: str, dtype: str) -> None:
    """The cache has as many blocks as fit into the bytes, and a step can use the last of them."""
    shape = BlockShape(num_layers=2, num_kv_heads=2, block_size=16, head_dim=32, dtype=getattr(torch, dtype))
    config = backend_config(
        checkpoints["qwen3-tied"],
        kv_cache_dtype=dtype,
        num_blocks=None,
        kv_memory=KVMemory(num_bytes=100 * shape.num_bytes),
    )
    backend: Any = load_backend(executor, config)
    assert (backend.memory_plan.num_blocks, backend.memory_plan.block_bytes) == (100, shape.num_bytes)
    assert sum(tensor.nbytes for pair in backend.cache for tensor in pair) == 100 * shape.num_bytes
    backend.step(make_batch({"token_ids": prompt(20, seed=1), "position": 0, "blocks": [99, 98]}))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_weights_larger_than_memory(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """Refuse the weights before reading them, naming both sizes; if they just fit, the refusal is for the cache."""
    num_bytes = load_backend(executor, backend_config(checkpoints["llama"])).memory_plan.weights_bytes
    for available in (num_bytes // 2, 2 * num_bytes):
        monkeypatch.setattr(
            f"quipu.kernels.{executor}.{executor}_backend.memory", lambda a=available: Memory(8 * GIB, a)
        )
        with pytest.raises(ValueError, match="the weights take" if available < num_bytes else "of memory is available"):
            load_backend(executor, backend_config(checkpoints["llama"]))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_profile_run(checkpoints: dict[str, Path], executor: str) -> None:
    """Measure more for larger passes, at least the size of their logits, and leave no state behind in the backend."""
    row = {"token_ids": prompt(40, seed=1), "position": 0, "blocks": scattered_blocks(3, seed=1)}
    drawn, workspaces = [], []
    for num_seqs, num_tokens in ((2, 64), (256, 4096)):
        config = backend_config(
            checkpoints["llama"], num_blocks=None, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens
        )
        backend = load_backend(executor, config)
        assert backend.memory_plan.num_blocks == 1 + 16 * 64
        workspaces.append(backend.memory_plan.workspace_bytes or 0)
        drawn.append(backend.step(make_batch(row)).token_ids)
        with pytest.raises(ValueError, match="carries slot 1"):  # nothing has been drawn for it
            backend.step(make_batch(row, {**row, "token_ids": [0], "carried": True}))
    assert drawn[0] == drawn[1]
    assert workspaces[1] >= max(4 * 256 * 320, workspaces[0])


def test_draft_model() -> None:
    """A draft model's blocks and weights are part of whatever memory is given."""
    draft = DraftMemory(MIB // 4, GIB)
    assert pool_of(num_blocks=100, draft=draft).num_blocks == 100
    assert pool_of(num_blocks=100, draft=draft).block_bytes == MIB
    assert pool_of(kv_memory=KVMemory(num_bytes=500 * MIB), draft=draft).num_blocks == 400
    # half of 16 GiB, less what is held, the draft model's weights, and a pass of each
    shared = pool_of(kv_memory=KVMemory(utilization=0.5), draft=draft)
    assert shared.num_blocks == 3 * GIB * 4 // (5 * MIB)
    with pytest.raises(ValueError, match=r"less 1\.00GiB for the draft model"):
        pool_of(kv_memory=KVMemory(num_bytes=12 * GIB), draft=draft)
