"""The accountant dies: at any message, at any point of it. Nobody notices.

Its successor goes on where it died: records, counters, what `prefix_cache.stats` says, the journal and what clients
were told are those of a life without a death, nothing twice and nothing lost. Only a request that kills it twice fails,
and only too many deaths end the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
import pytest
import structlog.testing
import trio
import trio.testing
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

from houses import Client, small_house
from journals import KeptJournal
from quipu.actors.accountant import Accountant
from quipu.actors.daybook import MAX_DEATHS, Page, Pending
from quipu.actors.messages import OpenAccount, Outcome, StepReport, Tokens, UsageRecord
from quipu.actors.restarts import ActorGivenUp
from quipu.kernels.fake import Dials

POINTS = ["unwritten", "written", "between effects", "at the send", "after the send", "done"]
"""Moments of a message's way, in order."""
TIGHT = {"num_blocks": 8, "max_model_len": 7 * 16, "watermark": 0.0, "max_num_batched_tokens": 64}
TIMES = {"received_at", "admitted_at", "first_token_at", "closed_at", "request_id"}


class Killed(Exception):
    """What the accountant dies of in these tests."""


@attrs.define
class Doom:
    """When it dies: at this point of its message number `at`, counted from 1, or of every message; once each."""

    point: str | None = None
    at: int | None = None
    """None: at every message."""
    num_heard: int = 0
    num_deaths: int = 0
    _last: Pending | None = None
    _struck: set[int] = attrs.field(factory=set)

    def hear(self, pending: Pending) -> None:
        if pending is not self._last:
            self._last = pending
            self.num_heard += 1

    def strike(self, point: str) -> None:
        if point == self.point and self.at in (None, self.num_heard) and self.num_heard not in self._struck:
            self._struck.add(self.num_heard)
            self.num_deaths += 1
            raise Killed(f"message {self.num_heard}, {point}")


class Mortal(Accountant):
    """An accountant with a doom."""

    def __init__(self, *arguments: Any, doom: Doom, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.doom = doom
        self._detokenizer = MortalSender(self._detokenizer.send, doom)
        settle = self._reckoning.settle

        def settle_and_die(page: Page, now: float) -> None:
            settle(page, now)
            doom.strike("between effects")

        self._reckoning.settle = settle_and_die

    async def _hear(self, pending: Pending) -> None:
        self.doom.hear(pending)
        self.doom.strike("unwritten")
        await super()._hear(pending)
        self.doom.strike("done")

    def _write(self, pending: Pending) -> Page | None:
        page = super()._write(pending)
        self.doom.strike("written")
        return page

    def _write_report(self, report: StepReport, now: float) -> None:
        super()._write_report(report, now)
        self.doom.strike("written")

    def _end_those_with_gaps(self, report: StepReport) -> None:
        self.doom.strike("after the send")
        super()._end_those_with_gaps(report)


@attrs.frozen
class MortalSender:
    _send: Callable[[Tokens], Awaitable[None]]
    _doom: Doom

    async def send(self, tokens: Tokens) -> None:
        await trio.lowlevel.checkpoint()
        self._doom.strike("at the send")
        await self._send(tokens)


# ---------------------------------------------------------------- one life


@attrs.frozen
class Life:
    """What came of the scenario."""

    told: dict[str, Any]
    """By client's id."""
    records: dict[str, dict[str, Any]]
    admitted: list[tuple[str, int | None, int | None]]
    counters: dict[str, float]
    stats: dict[str, float]


def without_ids(answer: Any) -> Any:
    """What does not differ from one server to the next."""
    if isinstance(answer, list):
        return [without_ids(item) for item in answer]
    return {k: v for k, v in answer.items() if k not in ("id", "created")} if isinstance(answer, dict) else answer


def timeless(record: UsageRecord) -> dict[str, Any]:
    return {name: value for name, value in attrs.asdict(record, recurse=False).items() if name not in TIMES}


async def live(doom: Doom, journal: KeptJournal | None = None) -> Life:
    """Streamed, plain, two choices, two prompts, preempted ones, one that leaves, one whose step fails."""
    told: dict[str, Any] = {}
    dials, journal = Dials(step_seconds=0.01), KeptJournal() if journal is None else journal
    house = small_house(
        dials, journal=journal, hire_accountant=partial(Mortal, doom=doom), max_restarts=10_000, **TIGHT
    )
    with structlog.testing.capture_logs():  # rendering a hundred deaths takes longer than dying them
        async with house as client:
            with trio.fail_after(60):
                await scenario(client, dials, told)
            counters = samples(client)
            return Life(
                told=told,
                records={str(record.client_request_id): timeless(record) for record in journal.closed},
                admitted=sorted((str(r.client_request_id), r.prompt_tokens, r.cached_tokens) for r in journal.admitted),
                counters={n: v for n, v in counters.items() if "_seconds_" not in n or n.endswith("_seconds_count")},
                stats=client.house.daybook.stats.fields(),
            )


async def scenario(client: Client, dials: Dials, told: dict[str, Any]) -> None:
    """One request after the other, but for a crowd that outgrows the pool."""
    http = over_http(client)

    async def whole(name: str, path: str, request: dict[str, Any]) -> None:
        async with http.open("POST", path, request, {"X-Request-Id": name}) as exchange:
            told[name] = without_ids(await exchange.json())

    async def stream(name: str, path: str, request: dict[str, Any]) -> None:
        async with http.open("POST", path, {**request, **STREAMED}, {"X-Request-Id": name}) as exchange:
            told[name] = without_ids(await exchange.chunks())

    chat = {"model": "demo", "messages": [{"role": "user", "content": "why"}], "max_tokens": 3, "temperature": 0}
    prompt = prompt_of(40, seed=1)
    await stream("streamed", CHAT, chat)
    await whole("plain", COMPLETIONS, body(prompt, max_tokens=3))
    async with trio.open_nursery() as nursery:
        # sequences of one request are planned together only where a step is under way when they come
        nursery.start_soon(whole, "busy", COMPLETIONS, body(prompt_of(9, seed=3), max_tokens=16))
        await trio.sleep(0.0253)
        await whole("choices", COMPLETIONS, body(prompt, max_tokens=3, n=2))
        await trio.sleep(0.0053)
        await stream("prompts", COMPLETIONS, body([prompt[:20], prompt_of(20, seed=2)], max_tokens=2))
    async with trio.open_nursery() as nursery:
        for index in range(3):
            nursery.start_soon(whole, f"crowd {index}", COMPLETIONS, body(prompt_of(30, 5 + index), max_tokens=20))
            await trio.sleep(0.0013)
    request = body(prompt, max_tokens=60, **STREAMED)
    async with http.open("POST", COMPLETIONS, request, {"X-Request-Id": "left"}) as exchange:
        await trio.sleep(0.0453)
        exchange.leave()
        await trio.testing.wait_all_tasks_blocked()
    await settle(client)
    dials.fail_steps = 1
    await whole("failed", COMPLETIONS, body(prompt))
    await settle(client)


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


# ---------------------------------------------------------------- the end of patience


class Poisoned(Accountant):
    """One request is the death of it, always, at one stage of its reckoning."""

    def __init__(self, *arguments: Any, stage: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        do = getattr(self._reckoning, stage)

        def do_or_die(page: Page, *rest: Any) -> None:
            if page.opened.caller.client_request_id == "poison":
                raise Killed(stage)
            do(page, *rest)

        setattr(self._reckoning, stage, do_or_die)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", ["_admit", "_time_first_token", "_tell_started", "_close"])
async def test_a_request_that_kills_twice(autojump_clock: trio.abc.Clock, stage: str, stream: bool) -> None:
    """It fails with a clear error and a disputed record; nobody else notices; the counters are the records' sums."""
    journal, prompt = KeptJournal(), prompt_of(40)
    told: list[bytes] = []
    hire = partial(Poisoned, stage=stage)
    with structlog.testing.capture_logs() as lines:
        async with small_house(journal=journal, hire_accountant=hire) as client:
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
    assert [line["request_id"] for line in deaths] == [records["poison"].request_id] * MAX_DEATHS
    assert len(records) == len(journal.closed) == 5
    assert (records["poison"].outcome, records["poison"].disputed) == (Outcome.FAILED, True)
    assert [record.outcome for name, record in records.items() if name != "poison"] == [Outcome.FINISHED] * 4
    assert sum(b"could not be accounted for" in answer for answer in told) == 1
    assert after["usage_disputed_total"] == 1
    assert after["prompt_tokens_total"] == sum(record.prompt_tokens or 0 for record in journal.closed)
    assert after["prefix_cache_hits_total"] == sum(record.cached_tokens or 0 for record in journal.closed)
    assert after["generation_tokens_total"] == sum(record.completion_tokens for record in journal.closed)


async def test_too_many_deaths(autojump_clock: trio.abc.Clock) -> None:
    """An accountant that dies of everything ends the server with an error."""

    class Hopeless(Accountant):
        async def _hear(self, pending: Pending) -> None:
            raise Killed("again")

    with structlog.testing.capture_logs() as lines, pytest.raises(ExceptionGroup) as caught:
        async with small_house(hire_accountant=Hopeless, max_restarts=3) as client:
            client.open(prompt_of(10))
            await trio.sleep(60)
    assert caught.group_contains(ActorGivenUp)
    assert sum(line["event"] == "actor.died" for line in lines) == 4


async def test_deaths_long_ago_are_forgiven(autojump_clock: trio.abc.Clock) -> None:
    """Only those within the window count."""

    seen: list[Pending] = []

    class Frail(Accountant):
        async def _hear(self, pending: Pending) -> None:
            await super()._hear(pending)
            if type(pending.message) is OpenAccount and pending not in seen:
                seen.append(pending)
                raise Killed("an account")

    with structlog.testing.capture_logs():
        async with small_house(hire_accountant=Frail, max_restarts=1, restart_window_s=10.0) as client:
            for _ in range(4):
                answer = await client.ask(prompt_of(10))
                assert answer.record.outcome is Outcome.FINISHED
                await trio.sleep(11)
            await settle(client)
