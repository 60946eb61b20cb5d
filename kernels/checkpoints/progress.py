"""How far a checkpoint has been read: a bar where somebody looks at a terminal, else a line in the log now and then.

One is made by each source of weights that reads files.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Never

from tqdm import tqdm

_EVERY_S = 5.0

_log = logging.getLogger(__name__)


class LoadProgress:
    """Bytes read, of how many."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_read = 0
        self._started = self._said = time.monotonic()
        self._bar: tqdm[Never] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                desc="loading weights", total=num_bytes, unit="B", unit_scale=True, file=sys.stderr, leave=False
            )

    def advance(self, num_bytes: int) -> None:
        """So many more."""
        self._num_read += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif time.monotonic() - self._said >= _EVERY_S:
            self._said = time.monotonic()
            _log.info("loading weights: %d %% of %d bytes", 100 * self._num_read // self._num_bytes, self._num_bytes)

    def close(self) -> None:
        """All has been read that was wanted."""
        self.abandon()
        _log.info("weights are loaded: %d bytes in %.1f s", self._num_read, time.monotonic() - self._started)

    def abandon(self) -> None:
        """Take the bar away: something else is to be said."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
