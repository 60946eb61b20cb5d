"""The web process notices when its event loop was blocked."""

from __future__ import annotations

import math

import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from quipu.web.telemetry.loop_watch import INTERVAL_S, STALLED_S, watch_loop


class Lags(list[float]):
    """A histogram that keeps every value."""

    def observe(self, value: float) -> None:
        self.append(value)


async def test_lag_is_observed_and_a_stall_logged(mock_clock: MockClock) -> None:
    """Time during which the loop is blocked is observed as lag; only a long one is logged."""
    lags = Lags()
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_loop, lags)
            for held_s in (0.0, STALLED_S / 2, 2 * STALLED_S):
                await trio.testing.wait_all_tasks_blocked()
                mock_clock.jump(INTERVAL_S + held_s)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    expected = [0.0, STALLED_S / 2, 2 * STALLED_S]
    assert all(math.isclose(lag, wanted, abs_tol=1e-9) for lag, wanted in zip(lags, expected, strict=True))
    assert [(line["event"], line["lag_s"]) for line in logs] == [("loop.stalled", 2 * STALLED_S)]
