"""A pass's columns on the device: one buffer of 32-bit integers for each padded number of tokens, filled by the host.

`triton_backend.py` fills one a pass and copies it over in one go; `ops.py` hands its parts to the kernels. A CUDA graph
keeps reading the same buffer.

What must always hold: padding tokens stand at position 0 and write into slot 0 of the null block, which no row reads;
padding rows are empty and have no items. Items of a row are ascending chunks, side by side.
"""

from __future__ import annotations

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
class Room:
    """How much a set of columns holds."""

    num_tokens: int
    num_rows: int
    num_tiles: int
    num_items: int


class Columns:
    """`host[name]` and `device[name]` are one column on either side."""

    def __init__(self, room: Room, device: Device) -> None:
        self.room = room
        sizes = dict.fromkeys(_PER_TOKEN, room.num_tokens) | dict.fromkeys(_PER_ROW, room.num_rows)
        sizes |= {"item_start": room.num_rows + 1, "num_items": 1}
        # pairs: row and first token; row and chunk. The longest comes last, since only what is used is copied.
        sizes |= {"tiles": 2 * room.num_tiles, "items": 2 * room.num_items}
        # each column on 16 numbers of its own: kernels are compiled for aligned pointers
        total = sum(_aligned(size) for size in sizes.values())
        self._host = device.pinned(total)
        self._device = device.empty((total,), torch.int32)
        self._copied = device.event()
        host = self._host.numpy()
        self.host: dict[str, Int32s] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        self._items_at = total - _aligned(2 * room.num_items)
        for name, size in sizes.items():
            self.host[name] = host[start : start + size]
            self.device[name] = self._device[start : start + size]
            start += _aligned(size)
        self.num_tiles = 0
        self.num_items = 0

    def fill(
        self, batch: StepBatch, lengths: Int32s, tables: Int32s, *, block_size: int, chunk: int, tile: int
    ) -> None:
        """Lay a batch out and send it. `tables` is the host's copy of every slot's block table; a prompt's tile has
        `tile` tokens."""
        self._copied.wait()
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
        self._fill_items(lengths, first, chunk)
        self._fill_tiles(lengths, tile)
        used = self._items_at + 2 * self.num_items
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        self._copied.record()

    def _fill_empty_rows(self, num_rows: int, num_tokens: int) -> None:
        """A row without tokens at each token of padding, as far as there are rows; the rest are nobody's."""
        count = min(self.room.num_rows - num_rows, self.room.num_tokens - num_tokens)
        host, end = self.host, num_rows + count
        host["row_tokens"][num_rows:end] = host["row_ends"][num_rows:end] = np.arange(num_tokens, num_tokens + count)
        host["row_ends"][end:] = 1

    def _fill_items(self, lengths: Int32s, first: Int32s, chunk: int) -> None:
        """Rows of one token: every chunk up to the token's own."""
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
        """Rows of several tokens; a prompt's last tiles see the most keys and go first."""
        pairs = [(row, start) for row, length in enumerate(lengths) if length > 1 for start in range(0, length, tile)]
        self.num_tiles = len(pairs)
        self.host["tiles"][: 2 * len(pairs)] = np.array(pairs[::-1], dtype=np.int32).ravel()


def lengths_of(batch: StepBatch) -> Int32s:
    """Tokens of each row."""
    start = np.array(batch.query_start, dtype=np.int32)
    return start[1:] - start[:-1]


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
