"""The progress of reading a checkpoint: a bar on a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from typing import Never

from tqdm import tqdm

_INTERVAL_S = 5.0

_log = logging.getLogger(__name__)


class LoadProgress:
    """Counts bytes read, of a known total."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_read = 0
        self._started = self._logged = time.monotonic()
        self._bar: tqdm[Never] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                desc="loading weights", total=num_bytes, unit="B", unit_scale=True, file=sys.stderr, leave=False
            )

    def advance(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif time.monotonic() - self._logged >= _INTERVAL_S:
            self._logged = time.monotonic()
            _log.info("loading weights: %d %% of %d bytes", 100 * self._num_read // self._num_bytes, self._num_bytes)

    def close(self) -> None:
        """End the bar and log that loading is done."""
        self.abandon()
        _log.info("weights are loaded: %d bytes in %.1f s", self._num_read, time.monotonic() - self._started)

    def abandon(self) -> None:
        """Remove the bar, for example before an error is reported."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
