"""The adapters that a backend has loaded, each in a slot, and the slots of a pass's rows.

A backend makes one with its model, and puts each adapter's matrices where its products find them.

What must always hold: a slot's matrices are complete before any row can name it, and unchanged while one does. The
caller unloads an adapter after its last row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

import torch

from ..batch import StepBatch
from .adapter_folder import read_adapter_files
from .low_rank import LowRank, most_bytes, num_elements, read_low_rank
from .named_weights import NamedWeights


class AdapterSlots(ABC):
    """Loads and unloads adapters, from any thread; passes read it from theirs."""

    def __init__(self, weights: NamedWeights, *, dtype: torch.dtype, max_loras: int, max_rank: int) -> None:
        """`dtype`: of the model, and so of the adapters' matrices."""
        self._weights = weights
        self._dtype = dtype
        self._max_rank = max_rank
        self._lock = Lock()
        self._free = list(range(max_loras))
        self._slot_of: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Return what all slots take if each is full."""
        num_slots = len(self._free) + len(self._slot_of)
        return num_slots * num_elements(self._weights.linear, self._max_rank) * self._dtype.itemsize

    def load(self, folder: Path, expected: str | None) -> str:
        """Read an adapter, unless it is loaded; return its digest.

        Raises ValueError for one that cannot be applied, or has another digest than the expected one, or if no slot is
        free.
        """
        files = read_adapter_files(folder, most_bytes=most_bytes(self._weights.linear, self._max_rank))
        if expected is not None and files.digest != expected:
            raise ValueError(f"{folder} has changed: its digest is {files.digest}, not {expected}")
        matrices = read_low_rank(
            files, self._weights.linear, self._weights.others, max_rank=self._max_rank, dtype=self._dtype
        )
        with self._lock:
            if files.digest in self._slot_of:
                return files.digest
            if not self._free:
                raise ValueError(f"{len(self._slot_of)} adapters are loaded, which is the most: raise --max-loras")
            slot = self._free.pop(0)
            self._put(slot, matrices)
            self._slot_of[files.digest] = slot
        return files.digest

    def unload(self, digest: str) -> None:
        """Forget an adapter, if it is loaded."""
        with self._lock:
            slot = self._slot_of.pop(digest, None)
            if slot is not None:
                self._clear(slot)
                self._free.append(slot)

    def of_rows(self, batch: StepBatch) -> list[int | None] | None:
        """Return each row's slot. None: no row has one. Raises ValueError for an adapter that is not loaded."""
        if batch.adapters is None or not any(batch.adapters):
            return None
        missing = set(batch.adapters) - self._slot_of.keys() - {""}
        if missing:
            raise ValueError(f"adapter {min(missing)} is not loaded")
        return [self._slot_of[digest] if digest else None for digest in batch.adapters]

    @abstractmethod
    def _put(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Let products with rows of this slot use these matrices, by module."""

    @abstractmethod
    def _clear(self, slot: int) -> None:
        """Free the memory of a slot's matrices."""
