"""The progress of work that takes seconds: a bar on a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Never

from tqdm import tqdm

_INTERVAL_S = 5.0

_log = logging.getLogger(__name__)


class Progress:
    """Counts what is done, of a known total of bytes or files."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._unit = what, unit
        self._total = total
        self._num_done = 0
        self._logged = time.monotonic()
        self._bar: tqdm[Never] | None = None
        if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            short = "B" if unit == "bytes" else f" {unit}"
            self._bar = tqdm(
                desc=what, total=total, unit=short, unit_scale=unit == "bytes", file=sys.stderr, leave=False
            )

    def advance(self, count: int) -> None:
        self._num_done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._logged >= _INTERVAL_S:
            self._logged = time.monotonic()
            _log.info("%s: %d %% of %d %s", self._what, 100 * self._num_done // self._total, self._total, self._unit)

    def remove(self) -> None:
        """Remove the bar, for example before an error is reported."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LoadProgress(Progress):
    """Counts bytes read of a checkpoint."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__("loading weights", num_bytes, "bytes")
        self._started = time.monotonic()

    def close(self) -> None:
        """End the bar and log that loading is done."""
        self.remove()
        _log.info("weights are loaded: %d bytes in %.1f s", self._num_done, time.monotonic() - self._started)
