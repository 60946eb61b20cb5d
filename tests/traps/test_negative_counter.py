"""Trap: a part that is refreshed later is subtracted from a total that was frozen earlier; the difference is negative.

In another server "computed = prompt - cached", with the prompt of the first admission and the hits of a later one,
raised in the loop that delivers outputs and ended the server. Here counters only add what happened, once, and nothing
on that path subtracts.
"""

from __future__ import annotations

from itertools import pairwise

import trio

from tests.runtimes import small_runtime
from tests.traps.wire import SHARED, TIGHT, run_preempted_requests, samples, settle


async def test_counters_never_decrease(autojump_clock: trio.abc.Clock) -> None:
    """A request is readmitted with more cached tokens than its prompt has: no counter decreases, and it is served."""
    async with small_runtime(**TIGHT) as client:
        result = await run_preempted_requests(client, watches_counters=True)
        await settle(client)
        again = await client.ask([*SHARED, 300], max_tokens=1)
        history = [*result.counters, samples(client)]
    for before, after in pairwise(history):
        fallen = {name for name in before if name.endswith("_total") and after[name] < before[name]}
        assert not fallen
    assert all(value >= 0 for value in history[-1].values())
    assert history[-1]["recomputed_tokens_total"] == sum(a.record.recomputed_tokens for a in result.answers) > 0
    assert all(answer.error is None for answer in (*result.answers, again))
