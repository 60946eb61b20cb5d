"""Which sequences are in the step that an engine process is running, in memory that outlives it.

Written by the executor before and after each step, and read by the engine's host once the process has ended: a message
could not be sent by a process that crashes in its step, and would cost every step a write. The memory is a file without
a name that both processes map.

What must always hold: a record that was only half written reads as no step.
"""

from __future__ import annotations

import mmap
import os
from array import array

_WORD_BYTES = 8


class StepRecord:
    """Layout: the number of sequences, 0 if no step is running; then their ids."""

    def __init__(self, fileno: int) -> None:
        """Map the memory behind a file descriptor, which may be closed afterwards. Raises OSError."""
        self._map = mmap.mmap(fileno, os.fstat(fileno).st_size)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def open_memory(cls, max_num_seqs: int) -> int:
        """Return a file descriptor of new memory for `max_num_seqs` sequences. Raises OSError."""
        fileno = os.memfd_create("step_record")
        try:
            os.ftruncate(fileno, (1 + max_num_seqs) * _WORD_BYTES)
        except OSError:
            os.close(fileno)
            raise
        return fileno

    def begin(self, sequence_ids: list[int]) -> None:
        """Note that a step with these sequences begins."""
        words, count = self._words, len(sequence_ids)
        words[0] = 0
        words[1 : 1 + count] = memoryview(array("q", sequence_ids))
        words[0] = count

    def end(self) -> None:
        self._words[0] = 0

    def read(self) -> tuple[int, ...] | None:
        """Return the sequences of the step that is running, or None if there is none."""
        count = self._words[0]
        return tuple(self._words[1 : 1 + count]) if 0 < count < len(self._words) else None

    def close(self) -> None:
        self._words.release()
        self._map.close()
