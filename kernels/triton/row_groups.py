"""The rows of a pass that have an adapter, grouped by it, in tiles of rows with the same one.

What must always hold: the number of tiles is at most `most_tiles`, whatever the adapters, so that a CUDA graph with as
many programs computes all of them.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

Int32s = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class RowGroups:
    """On the device."""

    rows: torch.Tensor
    """Rows in the order of their adapters."""
    tiles: torch.Tensor
    """T * 3: slot, first row in that order, number of rows; those without rows are padding."""

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[0] // 3


def most_tiles(num_rows: int, tile: int, num_slots: int) -> int:
    """Return how many tiles so many rows may need."""
    return min(num_rows, num_rows // tile + num_slots)


def group_rows(slots: Int32s, tile: int) -> tuple[Int32s, Int32s]:
    """Return the rows with an adapter (a slot of at least 0) in the order of slots, and the tiles `[T, 3]`."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    order = order[np.count_nonzero(slots < 0) :]
    present, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    tiles = [
        (slot, start + done, min(tile, count - done))
        for slot, start, count in zip(present.tolist(), starts.tolist(), counts.tolist(), strict=True)
        for done in range(0, count, tile)
    ]
    return order, np.array(tiles, dtype=np.int32).reshape(-1, 3)
