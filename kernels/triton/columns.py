"""A pass's columns on the device: one buffer of 32-bit integers for each padded number of tokens, filled by the host.

`runner.py` fills one in each pass, which is copied to the device at once; `ops.py` passes its parts to kernels. A CUDA
graph always reads the same buffer. `Tables` has the block tables of all slots, of which only changes are sent.

What must always hold: padding tokens have position 0 and write into slot 0 of the null block, which no row reads;
padding rows are empty and have no items. Items of a row are adjacent, chunks ascending. After `update`, the device's
row of each slot of the batch begins with the batch's table.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from ..batch import StepBatch
from .device import Device

Int32s = npt.NDArray[np.int32]

_PER_TOKEN = ("token_ids", "carried", "carry_slots", "positions", "write_slots")
_PER_ROW = ("row_slots", "row_tokens", "row_ends")


@attrs.frozen
class Capacity:
    """The sizes for which a set of columns was allocated."""

    num_tokens: int
    num_rows: int
    num_tiles: int
    num_items: int
    num_adapted_tiles: int = 0


class Columns:
    """A pass's columns by name, on both sides: `host[name]` and `device[name]`."""

    def __init__(self, capacity: Capacity, device: Device) -> None:
        self.capacity = capacity
        sizes = dict.fromkeys(_PER_TOKEN, capacity.num_tokens) | dict.fromkeys(_PER_ROW, capacity.num_rows)
        sizes |= {"item_start": capacity.num_rows + 1, "num_items": 1}
        # tokens that have an adapter, in the order of slots, and their tiles (`row_groups.py`)
        sizes |= {"adapted_rows": capacity.num_tokens if capacity.num_adapted_tiles else 0}
        sizes |= {"adapted_tiles": 3 * capacity.num_adapted_tiles}
        # pairs: (row, first token) and (row, chunk). The longest column is last, since only the used part is copied.
        sizes |= {"tiles": 2 * capacity.num_tiles, "items": 2 * capacity.num_items}
        # each column begins at a multiple of 16 numbers: kernels are compiled for aligned pointers
        total = sum(_aligned(size) for size in sizes.values())
        self._host = device.pinned(total)
        self._device = device.empty((total,), torch.int32)
        self._copied = device.event()
        host = self._host.numpy()
        self.host: dict[str, Int32s] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        self._items_at = total - _aligned(2 * capacity.num_items)
        for name, size in sizes.items():
            self.host[name] = host[start : start + size]
            self.device[name] = self._device[start : start + size]
            start += _aligned(size)
        self.num_tiles = 0
        self.tile = 0
        """Tokens of each."""
        self.num_items = 0

    def fill(
        self,
        batch: StepBatch,
        lengths: Int32s,
        tables: Int32s,
        *,
        block_size: int,
        chunk: int,
        tile: int,
        adapted: tuple[Int32s, Int32s] | None = None,
    ) -> None:
        """Lay out a batch and copy it to the device.

        `tables` is the host's copy of every slot's block table; a tile of prefill has `tile` tokens; `adapted` are the
        tokens that have an adapter, and their tiles.
        """
        self._copied.synchronize()
        host = self.host
        num_tokens, num_rows = len(batch.token_ids), len(batch.slots)
        self._host[: self._items_at].zero_()
        slots = np.array(batch.slots, dtype=np.int32)
        query_start = np.array(batch.query_start, dtype=np.int32)
        first = np.array(batch.positions, dtype=np.int32)
        carried = np.array(batch.carried, dtype=bool)
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(first - query_start[:-1], lengths)
        token_rows = np.repeat(np.arange(num_rows), lengths)
        host["token_ids"][:num_tokens] = batch.token_ids
        host["carried"][query_start[:-1][carried]] = 1
        host["carry_slots"][query_start[:-1][carried]] = slots[carried]
        host["positions"][:num_tokens] = positions
        blocks = tables[slots[token_rows], positions // block_size]
        host["write_slots"][:num_tokens] = blocks * block_size + positions % block_size
        host["row_slots"][:num_rows] = slots
        host["row_tokens"][:num_rows] = query_start[:-1]
        host["row_ends"][:num_rows] = query_start[1:]
        self._fill_empty_rows(num_rows, num_tokens)
        if adapted is not None:
            rows, tiles = adapted
            host["adapted_rows"][: len(rows)] = rows
            host["adapted_tiles"][: tiles.size] = tiles.ravel()
        self._fill_items(lengths, first, chunk)
        self._fill_tiles(lengths, tile)
        used = self._items_at + 2 * self.num_items
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        self._copied.record()

    def _fill_empty_rows(self, num_rows: int, num_tokens: int) -> None:
        """Make each padding token an empty row, as far as there are rows; any further rows are marked as unused."""
        count = min(self.capacity.num_rows - num_rows, self.capacity.num_tokens - num_tokens)
        host, end = self.host, num_rows + count
        host["row_tokens"][num_rows:end] = host["row_ends"][num_rows:end] = np.arange(num_tokens, num_tokens + count)
        host["row_ends"][end:] = 1

    def _fill_items(self, lengths: Int32s, first: Int32s, chunk: int) -> None:
        """List the items of rows with one token: every chunk up to the token's own."""
        counts = np.where(lengths == 1, first // chunk + 1, 0)
        start = np.concatenate(([0], counts.cumsum()))
        self.num_items = int(start[-1])
        host, num_rows = self.host, len(lengths)
        host["item_start"][: num_rows + 1] = start
        host["item_start"][num_rows + 1 :] = self.num_items
        host["num_items"][0] = self.num_items
        items = host["items"][: 2 * self.num_items].reshape(-1, 2)
        items[:, 0] = np.repeat(np.arange(num_rows), counts)
        items[:, 1] = np.arange(self.num_items) - np.repeat(start[:-1], counts)

    def _fill_tiles(self, lengths: Int32s, tile: int) -> None:
        """List the tiles of rows with several tokens. A prompt's last tiles see the most keys and are started first."""
        pairs = [(row, start) for row, length in enumerate(lengths) if length > 1 for start in range(0, length, tile)]
        self.num_tiles, self.tile = len(pairs), tile
        self.host["tiles"][: 2 * len(pairs)] = np.array(pairs[::-1], dtype=np.int32).ravel()


class Tables:
    """Block tables by slot: `host[slot]` and `device[slot]`."""

    def __init__(self, max_num_seqs: int, max_blocks: int, num_blocks: int, device: Device) -> None:
        # rows are padded to multiples of 16 numbers: kernels are compiled for aligned strides
        self._width = max_blocks
        aligned = -(-max_blocks // 16) * 16
        self.host: Int32s = np.zeros((max_num_seqs, aligned), dtype=np.int32)
        self.device = torch.zeros((max_num_seqs, aligned), dtype=torch.int32, device=device.torch_device)
        self._known: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._num_blocks = num_blocks

    def update(self, slots: Sequence[int], block_tables: Sequence[list[int]]) -> None:
        """Take over the batch's tables. Raises ValueError for a block outside the cache, and then changes nothing."""
        changes = []
        for slot, table in zip(slots, block_tables, strict=True):
            known = self._known[slot]
            if known != table:
                start = len(known) if known == table[: len(known)] else 0
                new = np.array(table[start : self._width], dtype=np.int32)
                if len(new) and not (new.min() >= 0 and new.max() < self._num_blocks):
                    raise ValueError(f"block {new.min()} or {new.max()} is outside of 0 to {self._num_blocks - 1}")
                changes.append((slot, start, new, table))
        if not changes:
            return
        width = self.host.shape[1]
        places = np.concatenate([slot * width + start + np.arange(len(new)) for slot, start, new, _ in changes])
        sent = torch.from_numpy(np.stack([places, np.concatenate([new for _, _, new, _ in changes])]))
        sent_places, values = sent.to(self.device.device)
        self.device.view(-1)[sent_places] = values.to(torch.int32)
        for slot, start, new, table in changes:  # once nothing can raise any more, for want of memory for example
            self.host[slot, start : start + len(new)] = new
            self._known[slot] = list(table)


def lengths_of(batch: StepBatch) -> Int32s:
    """Return the number of tokens of each row."""
    start = np.array(batch.query_start, dtype=np.int32)
    return start[1:] - start[:-1]


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
