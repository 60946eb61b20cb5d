"""The accountant dies: at any message, at any point of it. Nobody notices.

Its successor goes on where it died: records, counters, what `prefix_cache.stats` says, the journal and what clients
were told are those of a life without a death, nothing twice and nothing lost. Only a request that kills it twice fails,
and only too many deaths end the server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import structlog.testing
import trio
import trio.testing

from quipu.actors.accountant.actor import Accountant
from quipu.actors.accountant.entry_store import MAX_CRASHES, Pending, RequestEntries
from quipu.actors.messages.accountant import OpenAccount
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.restarts import ActorGivenUp
from tests.journals import KeptJournal
from tests.lives import POINTS, Doom, Killed, Life, live
from tests.runtimes import read_answer, small_runtime
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Life, int]:
    """The life that all others are measured by, and how many messages it has."""
    doom = Doom()
    life = trio.run(live, doom, clock=trio.testing.MockClock(autojump_threshold=0))
    return life, doom.num_heard


def test_the_scenario_has_everything(undisturbed: tuple[Life, int]) -> None:
    """Otherwise the sweeps below would show little."""
    life, num_messages = undisturbed
    outcomes = {name: str(record["outcome"]) for name, record in life.records.items()}
    assert outcomes.pop("left") == "cancelled"
    assert outcomes.pop("failed") == "failed"
    assert set(outcomes.values()) == {"finished"} and len(outcomes) == 8
    assert life.counters["num_preemptions_total"] > 0
    assert life.counters["usage_disputed_total"] == 0
    assert life.counters["prefix_cache_hits_total"] > 0
    assert num_messages > 90


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_every_message(
    autojump_clock: trio.abc.Clock, undisturbed: tuple[Life, int], point: str
) -> None:
    """A life with a death at each message, one after the other, is the undisturbed life."""
    doom = Doom(point)
    assert await live(doom) == undisturbed[0]
    assert doom.num_heard == undisturbed[1]
    assert doom.num_deaths == doom.num_heard if point in ("unwritten", "done") else doom.num_deaths > 25


def die_once(point: str, at: int) -> tuple[Life, int]:
    doom = Doom(point, at)
    return trio.run(live, doom, clock=trio.testing.MockClock(autojump_threshold=0)), doom.num_deaths


def test_killed_at_message_k(undisturbed: tuple[Life, int]) -> None:
    """One death, at message k, for every k: the life is the undisturbed one. The points take turns."""
    life, num_messages = undisturbed
    num_deaths = 0
    for k in range(1, num_messages + 1):
        found, deaths = die_once(POINTS[k % len(POINTS)], k)
        assert found == life, f"killed at message {k}"
        num_deaths += deaths
    assert num_deaths > num_messages / 3, "not every message has every point"


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point_of_message_k(undisturbed: tuple[Life, int], point: str) -> None:
    """The same for each point of each message."""
    life, num_messages = undisturbed
    for k in range(1, num_messages + 1):
        assert die_once(point, k)[0] == life, f"killed at message {k}"


# ---------------------------------------------------------------- a journal that raises


@attrs.define(eq=False)
class FlakyJournal(KeptJournal):
    """Raises at the first call of one method for each request; where there is no request, at every other call."""

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
            raise Killed(method)


@pytest.mark.parametrize("method", ["admit", "close", "flush"])
async def test_the_journal_raises(autojump_clock: trio.abc.Clock, undisturbed: tuple[Life, int], method: str) -> None:
    """Once for each request, or at every other flush: everything is written once, and every client is told."""
    journal = FlakyJournal(method=method)
    assert await live(Doom(), journal) == undisturbed[0]
    assert journal.num_raised >= 9
    assert journal.open == {}


async def test_raising_release_affects_only_its_own_request(autojump_clock: trio.abc.Clock) -> None:
    """What raises when a client is shown its end is logged; the accountant goes on, and later requests are served."""
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


# ---------------------------------------------------------------- the end of patience


class Poisoned(Accountant):
    """One request is the death of it, always, at one stage of its reckoning."""

    def __init__(self, *arguments: Any, stage: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        do = getattr(self._effects, stage)

        def do_or_die(request: RequestEntries, *rest: Any) -> None:
            if request.opened.caller.client_request_id == "poison":
                raise Killed(stage)
            do(request, *rest)

        setattr(self._effects, stage, do_or_die)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", ["_admit", "_time_first_token", "_tell_started", "_close"])
async def test_a_request_that_kills_twice(autojump_clock: trio.abc.Clock, stage: str, stream: bool) -> None:
    """It fails with a clear error and a disputed record; nobody else notices; the counters are the records' sums."""
    journal, prompt = KeptJournal(), prompt_of(40)
    told: list[bytes] = []
    hire = partial(Poisoned, stage=stage)
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(journal=journal, make_accountant=hire) as client:
            http = over_http(client)

            async def ask(name: str) -> None:
                request = body(prompt, **(STREAMED if stream else {}))
                async with http.open("POST", COMPLETIONS, request, {"X-Request-Id": name}) as exchange:
                    await exchange.wait_started()
                    told.append(await exchange.read())

            await ask("before")
            async with trio.open_nursery() as nursery:
                for name in ("beside", "poison", "besides"):
                    nursery.start_soon(ask, name)
            await ask("after")
            await settle(client)
            after = samples(client)
    deaths = [line for line in lines if line["event"] == "actor.died"]
    records = {record.client_request_id: record for record in journal.closed}
    assert [line["request_id"] for line in deaths] == [records["poison"].request_id] * MAX_CRASHES
    assert len(records) == len(journal.closed) == 5
    poison = records["poison"]
    assert (poison.outcome, poison.disputed, poison.fault) == (Outcome.FAILED, True, None)
    assert [record.outcome for name, record in records.items() if name != "poison"] == [Outcome.FINISHED] * 4
    assert sum(b"could not be accounted for" in answer for answer in told) == 1
    assert after["usage_disputed_total"] == 1
    assert after["prompt_tokens_total"] == sum(record.prompt_tokens or 0 for record in journal.closed)
    assert after["prefix_cache_hits_total"] == sum(record.cached_tokens or 0 for record in journal.closed)
    assert after["generation_tokens_total"] == sum(record.completion_tokens for record in journal.closed)


async def test_too_many_deaths(autojump_clock: trio.abc.Clock) -> None:
    """An accountant that dies of everything ends the server with an error."""

    class Hopeless(Accountant):
        async def _handle(self, pending: Pending) -> None:
            raise Killed("again")

    with structlog.testing.capture_logs() as lines, pytest.raises(ExceptionGroup) as caught:
        async with small_runtime(make_accountant=Hopeless, max_restarts=3) as client:
            client.open(prompt_of(10))
            await trio.sleep(60)
    assert caught.group_contains(ActorGivenUp)
    assert sum(line["event"] == "actor.died" for line in lines) == 4


async def test_deaths_long_ago_are_forgiven(autojump_clock: trio.abc.Clock) -> None:
    """Only those within the window count."""

    seen: list[Pending] = []

    class Frail(Accountant):
        async def _handle(self, pending: Pending) -> None:
            await super()._handle(pending)
            if type(pending.message) is OpenAccount and pending not in seen:
                seen.append(pending)
                raise Killed("an account")

    with structlog.testing.capture_logs():
        async with small_runtime(make_accountant=Frail, max_restarts=1, restart_window_s=10.0) as client:
            for _ in range(4):
                answer = await client.ask(prompt_of(10))
                assert answer.record.outcome is Outcome.FINISHED
                await trio.sleep(11)
            await settle(client)
