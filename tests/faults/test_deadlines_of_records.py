"""Deadlines of requests that have ended and whose records wait for a disk that fails: their clients are answered, and
each request has its one record once the disk works again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.actors.ledger.entries import EntryKind
from quipu.actors.messages.handler import Closed, OutletEvent
from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.kernels.fake import Dials
from tests.actors.ledger.ledgers import entries_in
from tests.actors.ledger.test_durable_journal import open_desk, running, until
from tests.fake_oracle import continuation
from tests.runtimes import small_runtime, text_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(40)


async def expire(ticket: OpenRequest) -> Closed:
    """Let a request's deadline pass, and return its answer."""
    ticket.expire(5.0)
    events: list[OutletEvent] = []
    with trio.fail_after(30):
        while not any(isinstance(event, Closed) for event in events):
            events = await ticket.mailbox.get()
    (closed,) = (event for event in events if isinstance(event, Closed))
    return closed


def records_in(folder: Path) -> dict[str, UsageRecord]:
    """Return the closing records in a ledger, by request."""
    return {entry.request_id: entry.record() for entry in entries_in(folder) if entry.kind is EntryKind.CLOSED}


@pytest.mark.parametrize(("fault", "fsync"), [("fails_writes", False), ("fails_syncs", True)])
async def test_answered_before_the_record(tmp_path: Path, fault: str, fsync: bool) -> None:
    """While the disk fails, nobody is told of success. At its deadline a client gets an error: that it has passed, or
    its own. Then each request is recorded once, with what it has done, and counted so."""
    desk = open_desk(tmp_path, fsync=fsync)
    async with running(desk), small_runtime(journal=desk.journal) as client:
        filed = client.runtime.entry_store.filed
        setattr(desk.dials, fault, True)
        tickets, finals = [client.open(PROMPT, max_tokens=4) for _ in range(3)], list[Closed]()
        for number, ticket in enumerate(tickets, 1):
            ticket.mailbox.when_closed(finals.append)
            await ticket.start()
            await until(lambda number=number: len(filed) == number)
        assert client.runtime.entry_store.num_open_accounts == 0 and not finals
        late, refused = [await expire(ticket) for ticket in tickets[:2]]
        assert late.error is not None and late.error.kind is ErrorKind.TIMEOUT
        assert refused.error is not None and refused.error.kind is ErrorKind.OVERLOADED
        assert not late.is_final and not refused.is_final and len(filed) == 3
        for ticket in tickets[:2]:
            ticket.expire(5.0)
            ticket.leave()
        setattr(desk.dials, fault, False)
        await until(lambda: len(finals) == 3)
        tickets[2].leave()
        await settle(client)
        counted = samples(client)
    assert [final.record.outcome for final in finals] == [Outcome.FINISHED, Outcome.REJECTED, Outcome.REJECTED]
    assert late.record == finals[0].record and len(filed) == 0
    records = records_in(tmp_path)
    assert sorted(desk.written) == sorted(ticket.request_id for ticket in tickets) == sorted(records)
    assert records[tickets[0].request_id].completion_tokens == 4 == counted["generation_tokens_total"]
    assert counted['requests_total{outcome="finished"}'] == 1
    assert counted['requests_total{outcome="rejected"}'] == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_over_http(autojump_clock: trio.abc.Clock, tmp_path: Path, streamed: bool) -> None:
    """A client gets its 504, or its stream an error, at the deadline; it is not told of an end that is not recorded."""
    desk = open_desk(tmp_path)
    fields: dict[str, Any] = STREAMED if streamed else {}
    async with running(desk), small_runtime(Dials(step_seconds=0.25), journal=desk.journal) as client:
        http = over_http(client, request_timeout_s=30.0)
        desk.dials.fails_writes = True
        begun = trio.current_time()
        async with http.open("POST", COMPLETIONS, body(PROMPT, **fields)) as exchange:
            status = await exchange.wait_started()
            data = (await exchange.read()).decode()
        assert trio.current_time() == pytest.approx(begun + 30.0, abs=0.01) and desk.written == []
        desk.dials.fails_writes = False
        await settle(client)
        await until(lambda: len(desk.written) == 1)
    (record,) = records_in(tmp_path).values()
    assert (record.outcome, record.completion_tokens, record.disputed) == (Outcome.FINISHED, 8, False)
    if not streamed:
        assert status == 504 and json.loads(data)["error"]["message"] == "The request took longer than 30 seconds."
        return
    told = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    said = "".join(choice["text"] for chunk in told for choice in chunk.get("choices", ()))
    assert status == 200 and said == text_of(continuation(PROMPT, 8))
    assert "longer than 30 seconds" in told[-1]["error"]["message"]
    assert not any(chunk.get("usage") for chunk in told) and "[DONE]" not in data.splitlines()[-1]
