"""Trap: the time in the queue ends when the first step is done, and so contains the prefill that it is compared with.

Here a request leaves the queue when the step that admits it begins. An engine says how long that step took, and not at
which time it began, because its clock is not the server's.
"""

from __future__ import annotations

import pytest
import trio

from tests.journals import KeptJournal
from tests.scripted_engine import Admit, Compute, ScriptedEntry, Token, scripted_runtime, settle_scripted, tokens
from tests.traps.wire import COMPLETIONS, body, over_http, prompt_of, samples

STEP_S = 0.008
REPORTED_AFTER_S = 0.01
"""The scripted engine takes as long for each report."""


@pytest.mark.parametrize(
    ("step_s", "in_queue_s"),
    [(0.0, REPORTED_AFTER_S), (STEP_S, REPORTED_AFTER_S - STEP_S), (60.0, 0.0)],
    ids=["not known", "known", "longer than the request"],
)
async def test_prefill_is_not_time_in_queue(autojump_clock: trio.abc.Clock, step_s: float, in_queue_s: float) -> None:
    """The record and the histogram agree on when the step began, which is never before the request was received."""
    journal = KeptJournal()
    admit = Admit(read=0, tiers={"device": 0}, step_s=step_s)
    script: list[list[ScriptedEntry]] = [[admit, Compute(0, 70), Token()], *tokens(2)]
    async with scripted_runtime(lambda submit: script, journal=journal) as client:
        await over_http(client).post(COMPLETIONS, body(prompt_of(70)))
        await settle_scripted(client)
        metrics = samples(client)
    (record,) = journal.closed
    assert record.admitted_at is not None and record.first_token_at is not None
    assert record.admitted_at - record.received_at == pytest.approx(in_queue_s, abs=1e-4)
    assert record.first_token_at - record.received_at == pytest.approx(REPORTED_AFTER_S, abs=1e-4)
    assert metrics["request_queue_seconds_sum"] == pytest.approx(in_queue_s, abs=1e-4)
