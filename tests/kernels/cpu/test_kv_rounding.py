"""What the CPU kernels store in a KV cache of 8 bits: on every instruction set the bits that the reference stores.

What they compute with it is compared in `test_paths.py` and `test_invariance.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu import program
from quipu.kernels.cpu.program import STORED_KV, Bounds, Op, Pass
from quipu.kernels.kv_cache import BlockShape, KVCache
from quipu.kernels.reference.kv_slots import slots_of
from tests.kernels.cpu.cpu_backends import make_cpu_backend
from tests.kernels.cpu.cpu_paths import PATHS, CpuPath, kernels_of
from tests.kernels.kernel_checkpoints import FORMATS
from tests.kernels.step_batches import make_batch, prompt

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it

HEADS, WIDTH, TOKENS = 3, 48, 40
PANEL = 16


def heads() -> torch.Tensor:
    """Return heads of many magnitudes, with ties, zeros, the smallest numbers, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(4)
    x_NKE = torch.randn(TOKENS, HEADS, WIDTH, generator=generator) * torch.logspace(-30, 30, TOKENS).view(-1, 1, 1)
    x_NKE[1] = torch.randint(-254, 255, (HEADS, WIDTH), generator=generator) / 2
    x_NKE[1, :, 7] = 127
    x_NKE[2, 1] = 0
    x_NKE[3] = torch.randint(-300, 301, (HEADS, WIDTH), generator=generator) * 2.0**-149
    x_NKE[4, 0, 5], x_NKE[5, 1, 47], x_NKE[6, 2, 0] = float("nan"), float("inf"), -float("inf")
    return x_NKE


@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_broken_slot_fails_its_sequence(checkpoints: dict[str, Path], path: CpuPath, which: int) -> None:
    """Draw no token from a sequence that sees a key or value of infinity or NaN; another one draws as without it."""
    backend = make_cpu_backend(checkpoints["qwen3-odd"], kernels=kernels_of(path), **FORMATS["int8-kv"])
    rows = [
        {"slot": n, "token_ids": prompt(20, seed=n), "position": 0, "blocks": [5 + 2 * n, 6 + 2 * n]} for n in (0, 1)
    ]
    healthy = backend.step(make_batch(*rows))
    assert healthy.broken_rows == []
    with torch.inference_mode():
        backend.cache.scaled(1)[which].scales_BKS[5, 1, 3] = float("nan")
    more = [{**row, "token_ids": [7], "position": 20} for row in rows]
    together, alone = backend.step(make_batch(*more)), backend.step(make_batch(more[1]))
    assert together.broken_rows == [0]
    assert together.token_ids[1] == alone.token_ids[0]


@pytest.mark.parametrize("block_size", [8, 16, 48])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_stored_bits(path: CpuPath, block_size: int) -> None:
    """Store the codes and scales that the reference stores, keys in panels of 16 slots if blocks consist of these."""
    num_blocks = 1 + -(-TOKENS // block_size)
    block = BlockShape(num_layers=1, num_kv_heads=HEADS, block_size=block_size, head_dim=WIDTH, dtype=torch.int8)
    ours, theirs = KVCache(num_blocks, block), KVCache(num_blocks, block)
    k_NKE = heads()
    v_NKE = k_NKE.flip(0).contiguous()
    table, positions = torch.arange(1, num_blocks).flip(0), torch.arange(TOKENS)
    with torch.inference_mode():
        for cache in (ours, theirs):
            cache.fill(float("nan"))
        for slots, x_NKE in zip(slots_of(theirs, 0), (k_NKE, v_NKE), strict=True):
            slots.write(table[positions // block_size], positions % block_size, x_NKE)
    keys, values = ours[0]
    op = Op(
        kind=program.WRITE_KV,
        stored=STORED_KV[torch.int8],
        width=WIDTH,
        num_kv_heads=HEADS,
        x_stride=HEADS * WIDTH,
        z_stride=HEADS * WIDTH,
        x=k_NKE.data_ptr(),
        z=v_NKE.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
    )
    batch = StepBatch(
        slots=[0], query_start=[0, TOKENS], positions=[0], token_ids=[0] * TOKENS, block_tables=[table.tolist()],
        samples=[False],
    )  # fmt: skip
    bounds = Bounds(num_tokens=TOKENS, num_logits=1, num_blocks=num_blocks, num_positions=TOKENS, vocab_size=1)
    one_pass = Pass(batch, [], bounds=bounds, block_size=block_size, num_threads=2)
    one_pass.run(kernels_of(path).library, (Op * 1)(op), [])

    (our_keys, our_values), (their_keys, their_values) = ours.scaled(0), theirs.scaled(0)
    assert torch.equal(our_values.codes_BKSE, their_values.codes_BKSE)
    found_BKSE = our_keys.codes_BKSE
    if block_size % PANEL == 0:
        panels = found_BKSE.reshape(num_blocks, HEADS, block_size // PANEL, WIDTH, PANEL)
        found_BKSE = panels.transpose(-1, -2).reshape(found_BKSE.shape)
    assert torch.equal(found_BKSE, their_keys.codes_BKSE)
    for found, expected in ((our_keys, their_keys), (our_values, their_values)):
        same = found.scales_BKS.view(torch.int32) == expected.scales_BKS.view(torch.int32)
        assert (same | (found.scales_BKS.isnan() & expected.scales_BKS.isnan())).all()
