"""Trap: freeing the blocks of a preempted request sets its cached count to 0, so its hit is not reported.

Here the number is frozen at the first admission, and freeing blocks does not change it.
"""

from __future__ import annotations

import trio

from tests.runtimes import small_runtime
from tests.traps.wire import SHARED, TIGHT, run_preempted_requests, settle


async def test_preempted_request_keeps_its_hit(autojump_clock: trio.abc.Clock) -> None:
    """Requests that computed positions twice report the blocks granted first, like the request that was not
    preempted."""
    async with small_runtime(**TIGHT) as client:
        result = await run_preempted_requests(client)
        await settle(client)
    preempted = [answer for answer in result.answers if answer.record.recomputed_tokens > 0]
    assert 0 < len(preempted) < len(result.answers)
    for answer in result.answers:
        assert answer.record.cached_tokens == len(SHARED)
        assert answer.record.cached_by_tier is not None
        assert sum(answer.record.cached_by_tier.values()) == len(SHARED)
        assert answer.started[-1].cached_tokens == len(SHARED), "a stream must have the record's numbers"
        assert not answer.record.disputed
