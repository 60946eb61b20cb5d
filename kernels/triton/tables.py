"""Block tables of all slots, on the host and on the device; only changes since the last pass are sent.

What must always hold: after `update`, the device's row of each slot of the batch begins with the batch's table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .device import Device


class Tables:
    """Block tables by slot: `host[slot]` and `device[slot]`."""

    def __init__(self, max_num_seqs: int, max_blocks: int, num_blocks: int, device: Device) -> None:
        # rows are padded to multiples of 16 numbers: kernels are compiled for aligned strides
        self._width = max_blocks
        aligned = -(-max_blocks // 16) * 16
        self.host: npt.NDArray[np.int32] = np.zeros((max_num_seqs, aligned), dtype=np.int32)
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
