"""Checks the input file of a batch before any of its lines is run: in a thread, piece by piece, files in turn."""

from __future__ import annotations

from typing import Final

import attrs
import trio

from quipu.actors.threads import run_in_thread

from .batch_values import Batch, BatchError, BatchLimits, Line
from .file_folder import FileFolder
from .line_check import FileCheck

CHECK_BYTES: Final = 32 * 1024
"""That are checked in one go, within a millisecond or so: a thread that holds the interpreter lock for longer than its
switch interval (5 ms) makes the event loop wait for it once for every write to a socket."""
_checks: Final = trio.CapacityLimiter(1)
"""One file at a time: two threads would take turns of 5 ms."""


@attrs.frozen
class CheckedFile:
    lines: list[Line]
    errors: list[BatchError]
    """Why it cannot be run."""
    model: str | None
    """The first line's."""


async def check_file(batch: Batch, folder: FileFolder, limits: BatchLimits) -> CheckedFile:
    """Read a batch's input file, until it is cancelled. Raises OSError if that cannot be done now."""
    try:
        file = await run_in_thread(folder.open, batch.input_file_id)
    except FileNotFoundError:
        lost = BatchError(code="file_not_found", message="The input file does not exist any more.")
        return CheckedFile([], [lost], None)
    with file:
        check = FileCheck(file, batch.id, batch.endpoint, limits)
        while batch.cancelling_at is None and await run_in_thread(check.check_more, CHECK_BYTES, limiter=_checks):
            pass
    return CheckedFile(check.lines, check.errors, check.model)
