"""Requests that exceed their deadline: they are answered at once, whatever the engine does, and recorded once it has
ended them."""

from __future__ import annotations

import trio
import trio.testing

from quipu.actors.messages.handler import Closed, OutletEvent
from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.kernels.fake import Dials
from tests.journals import KeptJournal
from tests.runtimes import Client, kill_engine, small_runtime

PROMPT = list(range(300, 340))


async def expire(ticket: OpenRequest) -> Closed:
    """Let a request's deadline pass and return its answer, which must be there immediately."""
    before = trio.current_time()
    ticket.expire(5.0)
    events: list[OutletEvent] = []
    while not any(isinstance(event, Closed) for event in events):
        events = await ticket.mailbox.get()
    assert trio.current_time() == before
    assert isinstance(events[-1], Closed)
    return events[-1]


async def settle(client: Client) -> None:
    while client.runtime.entry_store.num_open_accounts or client.runtime.desk.num_live_sequences:
        await trio.sleep(1)
    await trio.testing.wait_all_tasks_blocked()
    client.assert_at_rest()


async def test_engine_in_a_long_step(autojump_clock: trio.abc.Clock) -> None:
    """The response comes at the deadline, the record when the step has ended; the client sees one end."""
    journal = KeptJournal()
    async with small_runtime(Dials(step_seconds=3600.0), journal=journal) as client:
        ticket = client.open(PROMPT)
        finals: list[Closed] = []
        ticket.mailbox.when_closed(finals.append)
        await ticket.start()
        await trio.sleep(5)
        closed = await expire(ticket)
        assert closed.error is not None and closed.error.kind is ErrorKind.TIMEOUT and not closed.is_final
        ticket.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert client.runtime.entry_store.num_open_accounts == 1 and not journal.closed and not finals
        await settle(client)
        (record,) = journal.closed
        assert [final.record for final in finals] == [record] and ticket.mailbox.closed is finals[0]
        assert record.outcome is Outcome.FAILED and record.fault is None and not record.disputed
        assert record.prompt_tokens == record.computed_tokens == 40


async def test_engine_that_dies_after_the_deadline(autojump_clock: trio.abc.Clock) -> None:
    """The engine's death closes the account with one record: a timeout, not a fault of the server."""
    journal = KeptJournal()
    async with small_runtime(Dials(step_seconds=3600.0), journal=journal) as client:
        tickets = [client.open([*PROMPT, 400 + index]) for index in range(4)]
        for ticket in tickets:
            await ticket.start()
        await trio.sleep(5)
        for ticket in tickets:
            assert (await expire(ticket)).error is not None
            ticket.leave()
        kill_engine(client)
        await settle(client)
        assert len(journal.closed) == 4
        assert not any(record.disputed or record.fault for record in journal.closed)


async def test_full_inbox_does_not_delay_the_timeout(autojump_clock: trio.abc.Clock) -> None:
    """A request that still waits for a place in the tokenizer's inbox does not wait beyond its deadline."""
    journal = KeptJournal()
    async with small_runtime(submit_slots=1, encode_slots=1, journal=journal) as client:
        sequences = client.runtime.desk.sequences
        await sequences.slots.acquire()  # nothing more can be sent to the engine
        tickets = [client.open(PROMPT) for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for ticket in tickets:
                nursery.start_soon(ticket.start)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(5)
            for ticket in tickets:
                assert (await expire(ticket)).error is not None
            await trio.testing.wait_all_tasks_blocked()
            assert not nursery.child_tasks, "no task may still wait for the inbox"
        for ticket in tickets:
            ticket.leave()
        sequences.slots.release()
        await settle(client)
        assert [record.outcome for record in journal.closed] == [Outcome.REJECTED] * 4
