"""What the host sends to the device: a batch's columns and changed block tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quipu.kernels.triton.columns import Capacity, Columns, Tables, lengths_of
from tests.triton_kernels.interpreter import CpuDevice
from tests.triton_kernels.passes import make_batch


def test_columns() -> None:
    """Send a decoding row's chunks in ascending order and a prompt's last tile first, pad with writes to the null slot,
    and clear what an earlier, larger batch left."""
    tables = np.arange(8 * 4, dtype=np.int32).reshape(8, 4)
    columns = Columns(Capacity(num_tokens=10, num_rows=10, num_tiles=10, num_items=32), CpuDevice())
    blocks = [[0] * 4] * 3
    large = make_batch(*({"length": 1, "position": 15, "blocks": blocks[0], "slot": i} for i in range(8)))
    batch = make_batch(
        {"length": 5, "position": 2, "blocks": blocks[0], "slot": 3},
        {"length": 1, "position": 13, "blocks": blocks[1], "slot": 1},
        {"length": 1, "position": 0, "blocks": blocks[2], "slot": 5},
    )
    for one in (large, batch):
        columns.fill(one, lengths_of(one), tables, block_size=4, chunk=8, tile=2)
    sent = {name: column.tolist() for name, column in columns.device.items()}
    assert sent["positions"] == [2, 3, 4, 5, 6, 13, 0, 0, 0, 0]
    # slot 3 has blocks 12 to 15, slot 1 blocks 4 to 7, slot 5 blocks 20 to 23
    assert sent["write_slots"] == [12 * 4 + 2, 12 * 4 + 3, 13 * 4, 13 * 4 + 1, 13 * 4 + 2, 7 * 4 + 1, 20 * 4, 0, 0, 0]
    assert sent["row_slots"][:3] == [3, 1, 5]
    assert sent["row_tokens"] == [0, 5, 6, 7, 8, 9, 0, 0, 0, 0]
    assert sent["row_ends"] == [5, 6, 7, 7, 8, 9, 1, 1, 1, 1]
    assert sent["item_start"] == [0, 0, 2, 3, *[3] * 7]
    assert sent["num_items"] == [3]
    assert sent["items"][:6] == [1, 0, 1, 1, 2, 0]
    assert columns.num_tiles == 3
    assert sent["tiles"][:6] == [0, 4, 0, 2, 0, 0]


def test_tables() -> None:
    """Send longer, shorter and replaced tables of a slot; refuse a block that does not exist, changing nothing."""
    tables = Tables(max_num_seqs=3, max_blocks=4, num_blocks=50, device=CpuDevice())

    def row(slot: int, length: int) -> list[int]:
        assert torch.equal(tables.device, torch.from_numpy(tables.host))
        return tables.device[slot, :length].tolist()

    growing = [7, 8]
    tables.update([2, 0], [growing, [5]])
    assert (row(2, 2), row(0, 1)) == ([7, 8], [5])
    growing.append(9)
    tables.update([2], [growing])
    assert row(2, 3) == [7, 8, 9]
    tables.update([2, 1], [[9, 8], [1, 2, 3, 4, 6]])  # longer than the longest sequence needs
    assert (row(2, 2), row(1, 4)) == ([9, 8], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="block 50"):
        tables.update([0, 2], [[6], [50]])
    assert row(0, 1) == [5]
    tables.update([0], [[6]])
    assert row(0, 1) == [6]
