"""One fixed scenario in a runtime whose accountant crashes as planned, and everything observable about it.

Two results are equal if records, counters, `prefix_cache.stats`, the journal and the responses are equal; ids,
times and drawn seeds are left out, since they differ between servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import structlog.testing
import trio
import trio.testing

from quipu.actors.accountant.actor import Accountant
from quipu.actors.accountant.entry_store import Pending
from quipu.actors.accountant.request_entries import RequestEntries
from quipu.actors.channel import EagerSender
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.detokenizer import Tokens
from quipu.actors.messages.usage_record import UsageRecord
from quipu.kernels.fake import Dials
from tests.journals import KeptJournal
from tests.runtimes import Client, most_tokens, small_runtime
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

POINTS = ["unwritten", "written", "between effects", "at the send", "after the send", "done"]
"""Points in the handling of a message, in order."""
TIGHT = {"num_blocks": 8, "max_model_len": 7 * 16, "watermark": 0.0, "max_num_batched_tokens": 64}
TIMES = {"received_at", "admitted_at", "first_token_at", "closed_at", "request_id", "seed"}


class PlannedCrash(Exception):
    """The exception that the accountant crashes with in these tests."""


@attrs.define
class CrashPlan:
    """When to crash: at `point` of message number `at`, counted from 1, or of every message; once each."""

    point: str | None = None
    at: int | None = None
    """None: at every message."""
    num_messages: int = 0
    num_crashes: int = 0
    _last: Pending | None = None
    _done: set[int] = attrs.field(factory=set)

    def note(self, pending: Pending) -> None:
        if pending is not self._last:
            self._last = pending
            self.num_messages += 1

    def crash_if_due(self, point: str) -> None:
        if point == self.point and self.at in (None, self.num_messages) and self.num_messages not in self._done:
            self._done.add(self.num_messages)
            self.num_crashes += 1
            raise PlannedCrash(f"message {self.num_messages}, {point}")


class CrashingAccountant(Accountant):
    """An accountant that crashes as planned."""

    def __init__(self, *arguments: Any, plan: CrashPlan, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.plan = plan
        self._detokenizer = CrashingSender(self._detokenizer, plan)
        apply_due, write_report = self._effects.apply_due, self._writer.write_report

        def apply_and_crash(request: RequestEntries, now: float) -> None:
            apply_due(request, now)
            plan.crash_if_due("between effects")

        def write_and_crash(report: StepReport, first_ids: Sequence[int], now: float) -> None:
            write_report(report, first_ids, now)
            plan.crash_if_due("written")

        self._effects.apply_due = apply_and_crash
        self._writer.write_report = write_and_crash

    async def _handle(self, pending: Pending) -> None:
        self.plan.note(pending)
        self.plan.crash_if_due("unwritten")
        await super()._handle(pending)
        self.plan.crash_if_due("done")

    def _handle_now(self, pending: Pending) -> bool:
        self.plan.note(pending)
        self.plan.crash_if_due("unwritten")
        is_handled = super()._handle_now(pending)
        if is_handled:
            self.plan.crash_if_due("done")
        return is_handled

    def _write(self, pending: Pending) -> None:
        super()._write(pending)
        self.plan.crash_if_due("written")

    def _end_those_with_gaps(self, report: StepReport) -> None:
        self.plan.crash_if_due("after the send")
        super()._end_those_with_gaps(report)


@attrs.frozen
class CrashingSender:
    _channel: EagerSender[Tokens]
    _plan: CrashPlan

    def deliver_now(self, tokens: Tokens) -> bool:
        self._plan.crash_if_due("at the send")
        return self._channel.deliver_now(tokens)

    def send_nowait(self, tokens: Tokens) -> bool:
        self._plan.crash_if_due("at the send")
        return self._channel.send_nowait(tokens)

    async def send(self, tokens: Tokens) -> None:
        """Wait for a slot, when there was none."""
        self._plan.crash_if_due("at the send")
        await self._channel.send(tokens)


# ---------------------------------------------------------------- one run


@attrs.frozen
class ScenarioResult:
    """Everything observable about one run of the scenario."""

    responses: dict[str, Any]
    """By client's id."""
    records: dict[str, dict[str, Any]]
    admitted: list[tuple[str, int | None, int | None]]
    counters: dict[str, float]
    stats: dict[str, float]


def without_ids(answer: Any) -> Any:
    """Remove what differs between servers."""
    if isinstance(answer, list):
        return [without_ids(item) for item in answer]
    return {k: v for k, v in answer.items() if k not in ("id", "created")} if isinstance(answer, dict) else answer


def without_times(record: UsageRecord) -> dict[str, Any]:
    return {name: value for name, value in attrs.asdict(record, recurse=False).items() if name not in TIMES}


def comparable(counters: dict[str, float]) -> dict[str, float]:
    """Return the samples that do not depend on the clock, nor on how often an actor was killed."""
    return {
        name: value
        for name, value in counters.items()
        if ("_seconds_" not in name or name.endswith("_seconds_count")) and not name.startswith("actor_restarts")
    }


async def run_scenario(plan: CrashPlan, journal: KeptJournal | None = None) -> ScenarioResult:
    """Run the scenario: streamed, plain, two choices, two prompts, preempted, a client that leaves, a failing step."""
    responses: dict[str, Any] = {}
    dials, journal = Dials(step_seconds=0.01), KeptJournal() if journal is None else journal
    runtime = small_runtime(
        dials, journal=journal, make_accountant=partial(CrashingAccountant, plan=plan), max_restarts=10_000, **TIGHT
    )
    with structlog.testing.capture_logs():  # rendering a hundred tracebacks takes longer than the crashes
        async with runtime as client:
            with trio.fail_after(60):
                await scenario(client, dials, responses)
            counters = samples(client)
            return ScenarioResult(
                responses=responses,
                records={str(record.client_request_id): without_times(record) for record in journal.closed},
                admitted=sorted((str(r.client_request_id), r.prompt_tokens, r.cached_tokens) for r in journal.admitted),
                counters=comparable(counters),
                stats=client.runtime.entry_store.stats.fields(),
            )


async def scenario(client: Client, dials: Dials, responses: dict[str, Any]) -> None:
    """Send one request after the other, except for a group that outgrows the block pool."""
    http = over_http(client)

    async def whole(name: str, path: str, request: dict[str, Any]) -> None:
        async with http.open("POST", path, request, {"X-Request-Id": name}) as exchange:
            responses[name] = without_ids(await exchange.json())

    async def stream(name: str, path: str, request: dict[str, Any]) -> None:
        async with http.open("POST", path, {**request, **STREAMED}, {"X-Request-Id": name}) as exchange:
            responses[name] = without_ids(await exchange.chunks())

    chat = {"model": "demo", "messages": [{"role": "user", "content": "why"}], "max_tokens": 3, "temperature": 0}
    prompt, num_busy = prompt_of(40, seed=1), 12 + 4 * most_tokens.get()
    await stream("streamed", CHAT, chat)
    await whole("plain", COMPLETIONS, body(prompt, max_tokens=3))
    async with trio.open_nursery() as nursery:
        # the sequences of a request are planned together only if a step is running when they arrive
        nursery.start_soon(whole, "busy", COMPLETIONS, body(prompt_of(9, seed=3), max_tokens=num_busy))
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
    dials.fail_steps = 2
    await whole("failed", COMPLETIONS, body(prompt))
    await settle(client)
