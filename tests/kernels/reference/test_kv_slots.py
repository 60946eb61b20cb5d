"""Rounding keys and values to 8 bits: what is stored, and that nothing broken is hidden."""

from __future__ import annotations

import pytest
import torch

from quipu.kernels.kv_cache import BlockShape, KVCache
from quipu.kernels.reference.kv_slots import round_heads, slots_of


def test_half_a_step_at_most() -> None:
    """Store integers within half a step of each element, in steps of 1/127 of the head's largest magnitude."""
    x_nKE = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 3).view(1, 3, 1)
    codes_nKE, scales_nK = round_heads(x_nKE)
    assert torch.equal(scales_nK, x_nKE.abs().amax(-1) / 127)
    assert (codes_nKE.abs().amax(-1) == 127).all()
    error_nKE = (codes_nKE.double() * scales_nK.double().unsqueeze(-1) - x_nKE.double()).abs()
    assert (error_nKE <= scales_nK.unsqueeze(-1) * 0.50001).all()


def test_ties_are_rounded_to_even() -> None:
    """Round halves to even integers, of either sign."""
    halves = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]
    assert round_heads(torch.tensor([[halves]]))[0].flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_zeros() -> None:
    """Give a head of zeros a scale of 0; a step too small for float32 counts as 0, too."""
    for value in (0.0, -0.0, 2.0**-149):
        codes_nKE, scales_nK = round_heads(torch.full((1, 1, 16), value))
        assert (codes_nKE == 0).all()
        assert scales_nK.item() == 0
    codes_nKE, _ = round_heads(
        torch.tensor([[[190 * 2.0**-149, 1.0 * 2.0**-149]]])
    )  # a step rounded down to 1 from 1.496
    assert codes_nKE.flatten().tolist() == [127, 1]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_broken_numbers_are_kept(broken: float) -> None:
    """Read NaN from a head that has infinity or NaN, and from no other."""
    block = BlockShape(num_layers=1, num_kv_heads=2, block_size=3, head_dim=5, dtype=torch.int8)
    cache = KVCache(4, block)
    cache.fill(0.0)
    x_nKE = torch.ones(2, 2, 5)
    x_nKE[1, 0, 4] = broken
    with torch.inference_mode():
        k_slots, v_slots = slots_of(cache, 0)
        v_slots.write(torch.tensor([2, 3]), torch.tensor([1, 2]), x_nKE)
        assert (k_slots.read(torch.arange(4)) == 0).all()
        read_BKSE = v_slots.read(torch.arange(4))
    read_BKSE = read_BKSE.clone()
    assert read_BKSE[3, 0, 2].isnan().all()
    read_BKSE[3, 0, 2] = 0
    assert read_BKSE[2, :, 1].eq(1).all()
    assert read_BKSE[3, 1, 2].eq(1).all()
    assert read_BKSE.sum() == 15


def test_scales_are_in_the_block() -> None:
    """Copy the scales with a block, and count them in its bytes; they stay aligned whatever the head's size."""
    block = BlockShape(num_layers=2, num_kv_heads=2, block_size=3, head_dim=5, dtype=torch.int8)
    cache = KVCache(4, block)
    assert block.num_bytes == 2 * 2 * 2 * (16 + 12)
    assert sum(tensor.nbytes for layer in range(2) for tensor in cache[layer]) == 4 * block.num_bytes
    cache.fill(0.0)
    with torch.inference_mode():
        slots_of(cache, 1)[0].write(torch.tensor([1]), torch.tensor([2]), torch.full((1, 2, 5), 3.0))
        cache.copy_blocks([(1, 3)])
        assert slots_of(cache, 1)[0].read(torch.tensor([3]))[0, :, 2].eq(3).all()
