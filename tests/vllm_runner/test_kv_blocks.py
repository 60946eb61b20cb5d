"""Blocks on the host: the parts of all ranks, each copied by its own rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quipu.kernels.vllm_runner.kv_blocks import KVBlocks

NUM_BLOCKS = 6


def layers_of(rank: int) -> list[torch.Tensor]:
    """Return two layers of a rank, each element of which says where it is."""
    made = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 99, (NUM_BLOCKS, 2, 3), generator=made, dtype=torch.uint8) for _ in range(2)]


def test_parts_of_ranks() -> None:
    """In the host's memory a block is the first rank's layers, then the second's; what is written is what was read."""
    layers = [layers_of(rank) for rank in range(2)]
    ranks = [KVBlocks(layers[rank], NUM_BLOCKS, rank, 2) for rank in range(2)]
    assert [(rank.own_bytes, rank.num_bytes) for rank in ranks] == [(12, 24), (12, 24)]
    host = np.zeros(2 * 24, np.uint8)
    for rank in ranks:
        rank.read([4, 1], host.data)
    wanted = [layer[block].flatten() for block in (4, 1) for rank in layers for layer in rank]
    assert host.tolist() == torch.cat(wanted).tolist()
    for rank in ranks:
        rank.write([2, 5], host.data)
    for rank_layers, before in zip(layers, (layers_of(0), layers_of(1)), strict=True):
        for layer, old in zip(rank_layers, before, strict=True):
            assert torch.equal(layer[[2, 5]], old[[4, 1]]) and torch.equal(layer[[0, 3]], old[[0, 3]])


def test_other_sizes() -> None:
    """Memory for other than these blocks is refused, that of one rank's part, too."""
    blocks = KVBlocks(layers_of(0), NUM_BLOCKS, 0, 2)
    with pytest.raises(ValueError, match="12 bytes for 1 blocks of 24"):
        blocks.read([3], memoryview(bytearray(12)))


@pytest.mark.parametrize("width", [3, 8])
def test_fresh_blocks(width: int) -> None:
    """Copies are made of what was there before, then fresh blocks are cleared whole, of any size."""
    made = torch.Generator().manual_seed(1)
    layers = [torch.randint(1, 99, (NUM_BLOCKS, 2, width), generator=made, dtype=torch.uint8) for _ in range(2)]
    before = [layer.clone() for layer in layers]
    KVBlocks(layers, NUM_BLOCKS).prepare([(1, 4), (4, 0)], [2, 5])
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[1, 3]], old[[1, 3]]) and torch.equal(layer[[4, 0]], old[[1, 4]])
        assert not layer[[2, 5]].any()
