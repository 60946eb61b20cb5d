"""Measures the lag of the web process's event loop, which delays every client: a histogram; a long lag is logged."""

from __future__ import annotations

from typing import Protocol

import structlog
import trio

INTERVAL_S = 0.1  # each wake-up of an idle process takes 0.3 ms of a processor, which steps could use
STALLED_S = 0.25

_log = structlog.get_logger("quipu.web")


class Histogram(Protocol):
    def observe(self, value: float, /) -> None: ...


async def watch_loop(lag_seconds: Histogram) -> None:
    """Observe the loop's lag, in seconds, until cancelled."""
    while True:
        due = trio.current_time() + INTERVAL_S
        await trio.sleep_until(due)
        lag_s = max(0.0, trio.current_time() - due)
        lag_seconds.observe(lag_s)
        if lag_s > STALLED_S:
            _log.warning("loop.stalled", lag_s=round(lag_s, 3))
