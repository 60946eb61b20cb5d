"""The accountant crashes, at any message and at any point of handling it, without any observable effect.

Its successor continues: records, counters, `prefix_cache.stats`, the journal and the responses are the same as without
a crash. Only a request that crashes it twice fails, and only too many crashes end the server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import attrs
import pytest
import structlog.testing
import trio
import trio.testing

from quipu.actors.accountant.actor import Accountant
from quipu.actors.accountant.entry_store import MAX_CRASHES, Pending
from quipu.actors.accountant.request_entries import RequestEntries
from quipu.actors.messages.accountant import OpenAccount
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.restarts import ActorGivenUp
from tests.crash_scenario import POINTS, CrashPlan, PlannedCrash, ScenarioResult, run_scenario
from tests.journals import KeptJournal
from tests.runtimes import most_tokens, read_answer, small_runtime
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle


@cache
def undisturbed(most_tokens: int) -> tuple[ScenarioResult, int]:
    """Run the scenario without a crash; a sequence yields at most `most_tokens` tokens per step."""
    plan = CrashPlan()
    result = trio.run(run_scenario, plan, clock=trio.testing.MockClock(autojump_threshold=0))
    return result, plan.num_messages


@pytest.fixture
def baseline(engines: None) -> tuple[ScenarioResult, int]:
    """The result without a crash, and the number of messages."""
    return undisturbed(most_tokens.get())


def test_scenario_is_comprehensive(baseline: tuple[ScenarioResult, int]) -> None:
    """The scenario has enough messages for the sweeps below to be meaningful."""
    result, num_messages = baseline
    outcomes = {name: str(record["outcome"]) for name, record in result.records.items()}
    assert outcomes.pop("left") == "cancelled"
    assert outcomes.pop("failed") == "failed"
    assert set(outcomes.values()) == {"finished"} and len(outcomes) == 8
    assert result.counters["num_preemptions_total"] > 0
    assert result.counters["usage_disputed_total"] == 0
    assert result.counters["prefix_cache_hits_total"] > 0
    assert num_messages > (90 if most_tokens.get() == 1 else 75)


@pytest.mark.parametrize("point", POINTS)
async def test_crash_at_every_message(
    autojump_clock: trio.abc.Clock, baseline: tuple[ScenarioResult, int], point: str
) -> None:
    """With a crash at each message in turn, the result is the same as without a crash."""
    plan = CrashPlan(point)
    assert await run_scenario(plan) == baseline[0]
    assert plan.num_messages == baseline[1]
    assert plan.num_crashes == plan.num_messages if point in ("unwritten", "done") else plan.num_crashes > 25


def crash_once(point: str, at: int) -> tuple[ScenarioResult, int]:
    plan = CrashPlan(point, at)
    return trio.run(run_scenario, plan, clock=trio.testing.MockClock(autojump_threshold=0)), plan.num_crashes


def test_crash_at_message_k(baseline: tuple[ScenarioResult, int]) -> None:
    """With one crash at message k, for every second k, the result is the same as without a crash. The points alternate.

    `test_crash_at_every_point_of_message_k` tries all, and takes long.
    """
    result, num_messages = baseline
    num_crashes = 0
    for number, k in enumerate(range(1, num_messages + 1, 2)):
        found, crashes = crash_once(POINTS[number % len(POINTS)], k)
        assert found == result, f"killed at message {k}"
        num_crashes += crashes
    assert num_crashes > num_messages / 6, "most crashes did not happen"


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_crash_at_every_point_of_message_k(baseline: tuple[ScenarioResult, int], point: str) -> None:
    """With one crash at any point of any message, the result is the same as without a crash."""
    result, num_messages = baseline
    for k in range(1, num_messages + 1):
        assert crash_once(point, k)[0] == result, f"killed at message {k}"


# ---------------------------------------------------------------- a journal that raises


@attrs.define(eq=False)
class FlakyJournal(KeptJournal):
    """Raises at the first call of one method for each request, or at every other flush."""

    method: str = ""
    num_raised: int = 0
    _seen: set[str] = attrs.field(factory=set)
    _num_flushes: int = 0

    def admit(self, so_far: UsageRecord) -> bool:
        self._first("admit", so_far.request_id)
        return super().admit(so_far)

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        self._first("close", record.request_id)
        super().close(record, release)

    def flush(self) -> None:
        self._num_flushes += 1
        self._first("flush", str(self._num_flushes // 2))
        super().flush()

    def _first(self, method: str, what: str) -> None:
        if method == self.method and what not in self._seen:
            self._seen.add(what)
            self.num_raised += 1
            raise PlannedCrash(method)


@pytest.mark.parametrize("method", ["admit", "close", "flush"])
async def test_journal_that_raises(
    autojump_clock: trio.abc.Clock, baseline: tuple[ScenarioResult, int], method: str
) -> None:
    """If the journal raises once per request, or at every other flush, everything is written once and every client gets
    its response."""
    journal = FlakyJournal(method=method)
    assert await run_scenario(CrashPlan(), journal) == baseline[0]
    assert journal.num_raised >= 9
    assert journal.open == {}


async def test_raising_release_affects_only_its_own_request(autojump_clock: trio.abc.Clock) -> None:
    """An exception from a release is logged; the accountant continues, and later requests are served."""
    journal = KeptJournal()
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(journal=journal) as client:
            ticket = client.open(prompt_of(10))
            ticket.mailbox.when_closed(lambda closed: 1 // 0)
            await ticket.start()
            await read_answer(ticket)
            ticket.leave()
            answer = await client.ask(prompt_of(20))
            assert answer.record.outcome is Outcome.FINISHED
            await settle(client)
    events = [line["event"] for line in lines]
    assert events.count("release.failed") == 1 and "actor.died" not in events
    assert len(journal.closed) == 2


# ---------------------------------------------------------------- limits on crashes


class CrashingOnOneRequest(Accountant):
    """Crashes every time it applies one kind of side effect of one request."""

    def __init__(self, *arguments: Any, stage: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        do = getattr(self._effects, stage)

        def do_or_crash(request: RequestEntries, *rest: Any) -> None:
            if request.opened.caller.client_request_id == "poison":
                raise PlannedCrash(stage)
            do(request, *rest)

        setattr(self._effects, stage, do_or_crash)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", ["_admit", "_time_first_token", "_tell_started", "_close"])
async def test_request_that_crashes_the_accountant_twice(
    autojump_clock: trio.abc.Clock, stage: str, stream: bool
) -> None:
    """The request fails with a clear error and a disputed record; others are unaffected; counters are the records'
    sums."""
    journal, prompt = KeptJournal(), prompt_of(40)
    responses: list[bytes] = []
    make = partial(CrashingOnOneRequest, stage=stage)
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(journal=journal, make_accountant=make) as client:
            http = over_http(client)

            async def ask(name: str) -> None:
                request = body(prompt, **(STREAMED if stream else {}))
                async with http.open("POST", COMPLETIONS, request, {"X-Request-Id": name}) as exchange:
                    await exchange.wait_started()
                    responses.append(await exchange.read())

            await ask("before")
            async with trio.open_nursery() as nursery:
                for name in ("beside", "poison", "besides"):
                    nursery.start_soon(ask, name)
            await ask("after")
            await settle(client)
            after = samples(client)
    crashes = [line for line in lines if line["event"] == "actor.died"]
    records = {record.client_request_id: record for record in journal.closed}
    assert [line["request_id"] for line in crashes] == [records["poison"].request_id] * MAX_CRASHES
    assert len(records) == len(journal.closed) == 5
    poison = records["poison"]
    assert (poison.outcome, poison.disputed, poison.fault) == (Outcome.FAILED, True, None)
    assert [record.outcome for name, record in records.items() if name != "poison"] == [Outcome.FINISHED] * 4
    assert sum(b"could not be accounted for" in answer for answer in responses) == 1
    assert after["usage_disputed_total"] == 1
    assert after["prompt_tokens_total"] == sum(record.prompt_tokens or 0 for record in journal.closed)
    assert after["prefix_cache_hits_total"] == sum(record.cached_tokens or 0 for record in journal.closed)
    assert after["generation_tokens_total"] == sum(record.completion_tokens for record in journal.closed)


async def test_too_many_accountant_crashes(autojump_clock: trio.abc.Clock) -> None:
    """An accountant that crashes on everything ends the server with an error."""

    class AlwaysCrashing(Accountant):
        async def _handle(self, pending: Pending) -> None:
            raise PlannedCrash("again")

    with structlog.testing.capture_logs() as lines, pytest.raises(ExceptionGroup) as caught:
        async with small_runtime(make_accountant=AlwaysCrashing, max_restarts=3) as client:
            client.open(prompt_of(10))
            await trio.sleep(60)
    assert caught.group_contains(ActorGivenUp)
    assert sum(line["event"] == "actor.died" for line in lines) == 4


async def test_crashes_between_work_do_not_count(autojump_clock: trio.abc.Clock) -> None:
    """However often it crashes, an accountant that handles messages in between is restarted."""

    seen: list[Pending] = []

    class CrashingPerAccount(Accountant):
        async def _handle(self, pending: Pending) -> None:
            await super()._handle(pending)
            if type(pending.message) is OpenAccount and pending not in seen:
                seen.append(pending)
                raise PlannedCrash("an account")

    with structlog.testing.capture_logs():
        async with small_runtime(make_accountant=CrashingPerAccount, max_restarts=1) as client:
            for _ in range(4):
                answer = await client.ask(prompt_of(10))
                assert answer.record.outcome is Outcome.FINISHED
            await settle(client)
    assert len(seen) == 4
