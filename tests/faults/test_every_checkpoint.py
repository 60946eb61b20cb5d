"""A request cancelled at any checkpoint leaves nothing behind.

An instrument counts the checkpoints of the request's own task (and, over HTTP, of every task in its scope) and cancels
it at the k-th, for every k until the request completes: streamed and not, through the request desk alone and through
the whole application. After each, open accounts, blocks, mailboxes and tasks are at their baseline.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
import pytest
import structlog.testing
import trio
import trio.testing

from quipu.actors.messages.handler import Delta
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.request_desk.mailbox import Mailbox
from tests.journals import KeptJournal
from tests.runtimes import Client, most_tokens, small_runtime
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(40)
MOST = 400
"""More checkpoints than any request here has."""


@attrs.define(eq=False)
class Checkpoints(trio.abc.Instrument):
    """Counts the checkpoints of a task and its child tasks, and cancels a scope at the k-th."""

    root: trio.lowlevel.Task | None = None
    at: int = 0
    scope: trio.CancelScope | None = None
    count: int = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """A task that has stepped is at a checkpoint, or at its end."""
        if self.root is None or not self._is_below(task):
            return
        self.count += 1
        if self.count == self.at and self.scope is not None:
            self.scope.cancel()

    def _is_below(self, task: trio.lowlevel.Task | None) -> bool:
        while task is not None:
            if task is self.root:
                return True
            task = task.parent_nursery.parent_task if task.parent_nursery is not None else None
        return False


@attrs.frozen
class Baseline:
    """Everything that a request could leave behind."""

    num_tasks: int
    num_open_requests: int
    num_tracked: int
    num_open_accounts: float
    num_journal_entries: int
    used_blocks: float

    @classmethod
    def of(cls, client: Client, journal: KeptJournal) -> Baseline:
        found = samples(client)
        return cls(
            num_tasks=trio.lowlevel.current_statistics().tasks_living,
            num_open_requests=client.runtime.desk.num_open_requests,
            num_tracked=len(client.runtime.text_store.tracked),
            num_open_accounts=found["open_accounts"],
            num_journal_entries=len(journal.open),
            used_blocks=found['kv_blocks{state="used"}'],
        )


def num_mailboxes() -> int:
    gc.collect()
    return sum(type(thing) is Mailbox for thing in gc.get_objects())


Request = Callable[[Client], Awaitable[None]]


async def ticket(client: Client, *, stream: bool) -> None:
    """Act as a handler without HTTP: wait for the end only, or take every event."""
    opened = client.open(PROMPT, n=2, max_tokens=4 * most_tokens.get())
    try:
        await opened.start()
        while opened.mailbox.closed is None:
            if stream:
                for event in await opened.mailbox.get():
                    assert not isinstance(event, Delta) or event.num_tokens == 1
            else:
                await opened.mailbox.peek()
                await opened.mailbox.get()
    finally:
        opened.leave()


async def http(client: Client, *, path: str, stream: bool) -> None:
    """Let the application serve one request whose client reads it to the end."""
    request: dict[str, Any] = {"model": "demo", "max_tokens": 4, "temperature": 0, **(STREAMED if stream else {})}
    if path == CHAT:
        request["messages"] = [{"role": "user", "content": "why is that so? " * 3}]
    else:
        request = body(PROMPT, **request)
    async with over_http(client).open("POST", path, request) as exchange:
        assert await exchange.wait_started() == 200
        await exchange.read()


REQUESTS: list[Any] = [
    pytest.param(partial(ticket, stream=False), id="ticket, plain"),
    pytest.param(partial(ticket, stream=True), id="ticket, streamed"),
    pytest.param(partial(http, path=COMPLETIONS, stream=False), id="completions, plain"),
    pytest.param(partial(http, path=COMPLETIONS, stream=True), id="completions, streamed"),
    pytest.param(partial(http, path=CHAT, stream=False), id="chat, plain"),
    pytest.param(partial(http, path=CHAT, stream=True), id="chat, streamed"),
]


@pytest.mark.parametrize("request_", REQUESTS)
async def test_cancelled_at_checkpoint_k(autojump_clock: trio.abc.Clock, request_: Request) -> None:
    """For every k nothing is left, the record has the work done, and the next request is unaffected."""
    journal, instrument = KeptJournal(), Checkpoints()
    trio.lowlevel.add_instrument(instrument)
    try:
        with structlog.testing.capture_logs():
            async with small_runtime(journal=journal, max_num_batched_tokens=32) as client:
                num_checkpoints = await sweep(client, journal, instrument, request_)
                disputed = samples(client)["usage_disputed_total"]
    finally:
        trio.lowlevel.remove_instrument(instrument)
    outcomes = [record.outcome for record in journal.closed]
    assert num_checkpoints > 4, "the sweep must cover a whole request"
    assert outcomes.count(Outcome.CANCELLED) > 1
    assert set(outcomes) == {Outcome.CANCELLED, Outcome.FINISHED}
    assert disputed == 0


async def serve(client: Client, instrument: Checkpoints, request_: Request, scope: trio.CancelScope, k: int) -> None:
    """Run one request in a task of its own, to be cancelled at its k-th checkpoint."""
    with scope:
        instrument.count, instrument.at, instrument.scope = 0, k, scope
        instrument.root = trio.lowlevel.current_task()
        await request_(client)
    instrument.root = None


async def sweep(client: Client, journal: KeptJournal, instrument: Checkpoints, request_: Request) -> int:
    """Cancel at checkpoint 1, 2, ... until the request completes; return how many it has."""
    await request_(client)
    await settle(client)
    baseline, mailboxes = Baseline.of(client, journal), num_mailboxes()
    for k in range(1, MOST):
        num_closed = len(journal.closed)
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, client, instrument, request_, scope, k)
        await settle(client)
        assert Baseline.of(client, journal) == baseline, f"after a cancellation at checkpoint {k}"
        assert len(journal.closed) - num_closed <= 1, "a request must have one record or none"
        if instrument.count < k:
            assert not scope.cancelled_caught
            assert num_mailboxes() == mailboxes, "something still refers to a request's mailbox"
            return instrument.count
    raise AssertionError(f"the request has more than {MOST} checkpoints")


async def test_client_leaves_at_any_checkpoint(autojump_clock: trio.abc.Clock) -> None:
    """A request is also cancelled if the server tells the application that its client has disconnected."""
    journal, chance = KeptJournal(), random.Random(1)
    with structlog.testing.capture_logs():
        async with small_runtime(journal=journal, max_num_batched_tokens=32) as client:
            for _ in range(60):
                request = body(PROMPT, max_tokens=6, **(STREAMED if chance.random() < 0.5 else {}))
                async with over_http(client).open("POST", COMPLETIONS, request) as exchange:
                    await trio.sleep(chance.choice((0, chance.random() * 0.09)))
                    for _ in range(chance.randrange(20)):
                        await trio.lowlevel.checkpoint()
                    exchange.leave()
                    await trio.testing.wait_all_tasks_blocked()
                await settle(client)
            assert samples(client)["usage_disputed_total"] == 0
    assert {record.outcome for record in journal.closed} >= {Outcome.CANCELLED}
