"""Background responses: started, followed, taken up again, cancelled and deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from quipu.actors.messages.handler import Closed, Delta, OutletEvent
from quipu.actors.messages.outcomes import ErrorKind, FinishReason
from quipu.actors.response_store.object_tables import ObjectTables
from quipu.web.api.openai import background_runs, response_keeper
from quipu.web.api.openai.stream_log import EventLog, LogBudget
from quipu.web.http.sse import PING
from tests.actors.response_store.stores import bytes_on_disk
from tests.runtimes import eventually, small_runtime
from tests.traps.wire import samples
from tests.web.api.openai.test_responses_answer import read_events
from tests.web.fakes import STARTED, FakeDesk, failure, record, scripted
from tests.web.stored import Stored, storing
from tests.web.wires import wait_opened

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi", "background": True}
PATIENCE_S = 30.0
ENDED = [Delta(0, "", 1, FinishReason.STOP), Closed(record(), None)]


@pytest.fixture
async def waiting(tmp_path: Path) -> AsyncIterator[Stored]:
    """An app whose requests begin with "Hel" and wait for what the test puts into their mailboxes."""
    async with storing(tmp_path, FakeDesk(scripted(STARTED, Delta(0, "Hel", 1, None)))) as stored:
        yield stored


def put(stored: Stored, *events: OutletEvent) -> None:
    for event in events:
        stored.desk.tickets[-1].mailbox.put(event)


def end_all(stored: Stored) -> None:
    """End what is still generated: otherwise the store would wait for it while it closes."""
    for ticket in stored.desk.tickets:
        for event in ENDED:
            ticket.mailbox.put(event)


async def wait_status(stored: Stored, name: str, status: str) -> Any:
    """Wait until a response has a status; return it."""
    while True:
        found = await stored.client.responses.retrieve(name)
        if found.status == status:
            return found
        await trio.sleep(0.005)


async def follow(stored: Stored, name: str, after: int | None = None) -> list[Any]:
    """Return the events of a response's stream after the one with this number."""
    query = "?stream=true" + ("" if after is None else f"&starting_after={after}")
    async with stored.raw.open("GET", f"{PATH}/{name}{query}", b"", {"Authorization": "Bearer a"}) as exchange:
        assert await exchange.wait_started() == 200
        data = await exchange.read()
    return read_events(data) if data else []


async def test_polled(waiting: Stored) -> None:
    """A response is queued, in progress and completed, and then what it would have been in the foreground."""
    waiting.desk.gate = trio.Event()
    begun = await waiting.client.responses.create(**BODY)
    assert begun.status == "queued" and begun.background and begun.output == [] and begun.usage is None
    assert (await waiting.client.responses.retrieve(begun.id)).status == "queued"
    waiting.desk.gate.set()
    await wait_status(waiting, begun.id, "in_progress")
    put(waiting, Delta(0, "lo", 1, None), *ENDED)
    ended = await wait_status(waiting, begun.id, "completed")
    assert ended.output_text == "Hello" and ended.usage is not None and ended.usage.total_tokens == 43
    assert waiting.store.num_running() == 0


async def test_not_continued_before_its_end(waiting: Stored) -> None:
    """A response that is still being generated cannot be continued, as its output is still to come; then it can."""
    begun = await waiting.client.responses.create(**BODY)
    for keeps in (True, False):
        with pytest.raises(openai.BadRequestError, match="still being generated") as refused:
            await waiting.client.responses.create(model="m", input="y", previous_response_id=begun.id, store=keeps)
        assert refused.value.code == "previous_response_in_progress"
        assert refused.value.param == "previous_response_id"
    put(waiting, Delta(0, "lo", 1, None), *ENDED)
    await wait_status(waiting, begun.id, "completed")
    body = {**BODY, "previous_response_id": begun.id}
    assert (await waiting.client.responses.create(**body)).previous_response_id == begun.id


async def test_too_long_prompt_fails(tmp_path: Path) -> None:
    """A request that would have been refused is a failed response with the reason."""
    desk = FakeDesk(scripted(failure(ErrorKind.INVALID, "too long", param="input", code="context_length_exceeded")))
    async with storing(tmp_path, desk) as stored:
        begun = await stored.client.responses.create(**BODY)
        failed = await wait_status(stored, begun.id, "failed")
    assert failed.error is not None and "too long" in failed.error.message and failed.usage is None


async def test_client_leaves_and_comes_back(waiting: Stored) -> None:
    """A stream whose client leaves goes on, and others take it up where it was, during and after its generation."""
    async with waiting.raw.open("POST", PATH, {**BODY, "stream": True}, {"Authorization": "Bearer a"}) as exchange:
        await exchange.wait_started()
        name = read_events(await exchange.read_some())[0]["response"]["id"]
        exchange.leave()
    await wait_opened(waiting.desk)
    assert waiting.desk.ticket.num_leaves == 0
    followed: dict[int | None, list[Any]] = {}

    async def read(after: int | None) -> None:
        followed[after] = await follow(waiting, name, after)

    async with trio.open_nursery() as nursery:
        for after in (None, 0, 4):
            nursery.start_soon(read, after)
        await trio.testing.wait_all_tasks_blocked()
        put(waiting, Delta(0, "lo", 1, None))
        await trio.testing.wait_all_tasks_blocked()
        put(waiting, *ENDED)
    whole = followed[None]
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[0]["type"] == "response.created" and whole[-1]["type"] == "response.completed"
    assert "".join(event["delta"] for event in whole if event["type"].endswith("text.delta")) == "Hello"
    assert followed[0] == whole[1:] and followed[4] == whole[5:]
    await eventually(lambda: waiting.store.num_running() == 0, "it is stored")
    assert await follow(waiting, name) == whole and await follow(waiting, name, 6) == whole[7:]
    assert await follow(waiting, name, len(whole)) == []
    found = await waiting.client.responses.retrieve(name)
    assert found.model_dump(mode="json") == openai.types.responses.Response(**whole[-1]["response"]).model_dump(
        mode="json"
    )


async def test_head_of_a_stream_that_goes_on(waiting: Stored) -> None:
    """A HEAD is answered with the head of the stream, and ends, while the response is generated."""
    async with waiting.raw.open("POST", PATH, {**BODY, "stream": True}, {"Authorization": "Bearer a"}) as exchange:
        await exchange.wait_started()
        name = read_events(await exchange.read_some())[0]["response"]["id"]
        exchange.leave()
    await wait_opened(waiting.desk)
    path = f"{PATH}/{name}?stream=true"
    with trio.fail_after(PATIENCE_S):
        async with waiting.raw.open("HEAD", path, b"", {"Authorization": "Bearer a"}) as exchange:
            assert await exchange.wait_started() == 200
            assert await exchange.read() == b""
    assert exchange.headers["content-type"].startswith("text/event-stream")
    end_all(waiting)


async def test_stream_by_the_client(tmp_path: Path) -> None:
    """The official client follows a background stream, and takes it up after an event."""
    async with storing(tmp_path) as stored:
        stream = await stored.client.responses.create(**BODY, stream=True)
        events = [event async for event in stream]
        name = events[-1].response.id
        again = [event async for event in await stored.client.responses.retrieve(name, stream=True, starting_after=3)]
    assert [event.model_dump() for event in again] == [event.model_dump() for event in events[4:]]


async def test_only_streams_are_followed(tmp_path: Path) -> None:
    """A response without a stream has none to follow."""
    async with storing(tmp_path) as stored:
        begun = await stored.client.responses.create(**BODY)
        await wait_status(stored, begun.id, "completed")
        plain = await stored.client.responses.create(model="tiny", input="x")
        for name in (begun.id, plain.id):
            status, answer = await stored.ask("GET", f"{PATH}/{name}?stream=true")
            assert status == 400 and answer["error"]["param"] == "stream"
        status, answer = await stored.ask("GET", f"{PATH}/{begun.id}?starting_after=1")
        assert status == 400 and answer["error"]["param"] == "starting_after"


@pytest.mark.parametrize("stream", [False, True])
async def test_cancel(waiting: Stored, stream: bool) -> None:
    """A cancelled response has left its engine, and says what it has used; a second time changes nothing."""
    if stream:
        async with waiting.raw.open("POST", PATH, {**BODY, "stream": True}, {"Authorization": "Bearer a"}) as exchange:
            await exchange.wait_started()
            name = read_events(await exchange.read_some())[0]["response"]["id"]
            cancelled = await waiting.client.responses.cancel(name)
            last = read_events(await exchange.read())[-1]
        assert last["type"] == "response.incomplete" and last["response"]["status"] == "cancelled"
    else:
        name = (await waiting.client.responses.create(**BODY)).id
        await wait_status(waiting, name, "in_progress")
        cancelled = await waiting.client.responses.cancel(name)
    assert cancelled.status == "cancelled" and cancelled.output_text == "Hel"
    assert cancelled.usage is not None and cancelled.usage.output_tokens == 1
    assert waiting.desk.ticket.num_leaves >= 1
    assert await waiting.client.responses.cancel(name) == cancelled == await waiting.client.responses.retrieve(name)
    plain = await waiting.client.responses.retrieve(name)
    assert plain.status == "cancelled"


async def test_cancelling_what_is_not_in_the_background(tmp_path: Path) -> None:
    """A response that its client waited for cannot be cancelled."""
    async with storing(tmp_path) as stored:
        given = await stored.client.responses.create(model="tiny", input="x")
        with pytest.raises(openai.BadRequestError, match="background"):
            await stored.client.responses.cancel(given.id)


async def test_delete_while_it_is_generated(waiting: Stored, tmp_path: Path) -> None:
    """Deleting a response ends its generation, and leaves nothing."""
    begun = await waiting.client.responses.create(**{**BODY, "input": "to be forgotten"})
    await wait_status(waiting, begun.id, "in_progress")
    await waiting.client.responses.delete(begun.id)
    assert waiting.desk.ticket.num_leaves >= 1 and waiting.store.num_running() == 0
    with pytest.raises(openai.NotFoundError):
        await waiting.client.responses.retrieve(begun.id)
    assert b"to be forgotten" not in bytes_on_disk(tmp_path)


async def test_other_tenants(waiting: Stored) -> None:
    """A response that is being generated is unknown to other tenants, who cannot cancel it."""
    begun = await waiting.client.responses.create(**BODY)
    for call in (waiting.other.responses.retrieve, waiting.other.responses.cancel, waiting.other.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await call(begun.id)
    assert waiting.desk.ticket.num_leaves == 0
    end_all(waiting)


async def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant has so many background responses at once, and all tenants together, too."""
    monkeypatch.setattr(background_runs, "MAX_RUNS", 3)
    async with storing(tmp_path, FakeDesk(scripted(STARTED)), max_background=2) as stored:
        first = await stored.client.responses.create(**BODY)
        await stored.client.responses.create(**BODY)
        status, answer = await stored.ask("POST", PATH, BODY)
        assert status == 503 and answer["error"]["code"] == "too_many_background_responses"
        assert len(stored.desk.tickets) == 2
        await stored.other.responses.create(**BODY)
        status, answer = await stored.ask("POST", PATH, BODY, key="b")
        assert status == 503 and answer["error"]["code"] == "overloaded"
        await stored.client.responses.cancel(first.id)
        assert (await stored.ask("POST", PATH, BODY))[0] == 200
        end_all(stored)


async def test_refused_by_the_desk(tmp_path: Path) -> None:
    """What cannot be opened is refused as in the foreground, and nothing of it is stored."""
    async with storing(tmp_path, FakeDesk(closed="shutting down")) as stored:
        status, _ = await stored.ask("POST", PATH, {**BODY, "input": "not to be kept"})
        assert status == 503 and stored.store.num_running() == 0
        await eventually(lambda: b"not to be kept" not in bytes_on_disk(tmp_path), "it is deleted")


async def test_start_that_fails(tmp_path: Path) -> None:
    """A request that crashes at its start is a failed response, and ends no other."""
    async with storing(tmp_path, FakeDesk(start_error=ValueError("secret"))) as stored:
        with capture_logs() as lines:
            begun = await stored.client.responses.create(**BODY)
            failed = await wait_status(stored, begun.id, "failed")
        assert failed.error is not None and "secret" not in failed.error.message
        assert [line["event"] for line in lines if line["log_level"] == "error"] == ["background_response.crashed"]
        stored.desk.start_error = None
        await wait_status(stored, (await stored.client.responses.create(**BODY)).id, "completed")


async def test_kept_until_it_can_be_stored(waiting: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that cannot be stored is given from memory, and stored when the disk works again."""
    monkeypatch.setattr(response_keeper, "RETRY_S", 0.0)
    begun = await waiting.client.responses.create(**BODY)
    await wait_status(waiting, begun.id, "in_progress")

    def fail(*_: object) -> Any:
        raise OSError("disk full")

    with capture_logs(), monkeypatch.context() as patched:
        patched.setattr(ObjectTables, "end", fail)
        put(waiting, *ENDED)
        ended = await wait_status(waiting, begun.id, "completed")
        assert ended.output_text == "Hel" and waiting.store.num_running() == 1
    await eventually(lambda: waiting.store.num_running() == 0, "it is stored")
    assert await waiting.client.responses.retrieve(begun.id) == ended


async def test_conversation_is_locked(waiting: Stored) -> None:
    """One response at a time is made in a conversation; the lock ends with it, however it ends."""
    conversation = await waiting.client.conversations.create()
    body = {**BODY, "conversation": conversation.id}
    begun = await waiting.client.responses.create(**body)
    status, answer = await waiting.ask("POST", PATH, {**body, "background": False})
    assert status == 400 and answer["error"]["code"] == "conversation_locked"
    await waiting.client.responses.cancel(begun.id)
    assert [item async for item in waiting.client.conversations.items.list(conversation.id)] == []
    begun = await waiting.client.responses.create(**body)
    await wait_status(waiting, begun.id, "in_progress")
    put(waiting, *ENDED)
    await wait_status(waiting, begun.id, "completed")
    items: list[Any] = [item async for item in waiting.client.conversations.items.list(conversation.id, order="asc")]
    assert [item.content[0].text for item in items] == ["hi", "Hel"]


async def test_cancelled_within_a_step(tmp_path: Path) -> None:
    """A cancelled response frees its blocks within a step and is booked as cancelled, with what it has computed."""
    async with small_runtime() as runtime, storing(tmp_path, runtime.runtime.desk) as stored:
        body = {"model": "demo", "input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 400}
        _, begun = await stored.ask("POST", PATH, body)
        (engine,) = runtime.engines
        await eventually(lambda: bool(engine.batcher.sequences), "it runs")
        _, answer = await stored.ask("POST", f"{PATH}/{begun['id']}/cancel")
        assert answer["status"] == "cancelled" and 0 <= answer["usage"]["output_tokens"] < 400
        await eventually(lambda: not engine.batcher.sequences, "the engine is rid of it")
        await eventually(lambda: not runtime.runtime.entry_store.num_open_accounts, "its account is closed")
        ended = {key: value for key, value in samples(runtime).items() if key.startswith("requests_total") and value}
    assert list(ended.values()) == [1.0] and all('outcome="cancelled"' in key for key in ended)
    runtime.assert_at_rest()


def events(count: int, first: int = 0, size: int = 100) -> bytes:
    return b"".join(b"event: x\ndata: %d %s\n\n" % (number, b"x" * size) for number in range(first, first + count))


async def test_log_drops_its_oldest_events() -> None:
    """A log is bounded: whoever asks for what was dropped is told so, the others get every event once."""
    budget = LogBudget()
    log = EventLog(budget, max_bytes=10_000)
    for number in range(200):
        log.push(events(1, number))
        assert budget.num_bytes <= 10_000
    log.finish()
    assert log.num_events == 200 and 100 < log.first < 200
    read = b"".join([chunk async for chunk in log.read(log.first, 1.0)])
    assert read == events(200 - log.first, log.first)
    (told,) = [chunk async for chunk in log.read(3, 1.0)]
    assert b'"code":"events_dropped"' in told and b'"sequence_number":3' in told
    log.forget()
    assert budget.num_bytes == 0


async def test_log_makes_slow_events_in_slices() -> None:
    """What is pushed slowly is made a slice at a time, before what was pushed after it, and read as if at once."""
    log, made = EventLog(LogBudget()), list[int]()

    def chunks() -> Iterator[bytes]:
        for number in range(1, 41):
            made.append(number)
            yield events(1, number, 10_000)

    log.push(events(1, 0))
    log.push_slowly(chunks())
    log.push(events(1, 41))
    log.finish()
    assert not made and log.num_events == 1 and not log.is_over
    counts = set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.make)
        while not log.is_over:
            counts.add(len(made))
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert len(counts) > 4
    read = b"".join([chunk async for chunk in log.read(0, 1.0)])
    assert read == events(1, 0) + events(40, 1, 10_000) + events(1, 41)


async def test_log_drops_an_event_that_is_too_long() -> None:
    """An event that is longer than a log may be is never whole in memory; readers are told that it was dropped."""
    budget = LogBudget()
    log, most = EventLog(budget, max_bytes=50_000), 0

    def chunks() -> Iterator[bytes]:
        nonlocal most
        for piece in (b"event: x\ndata: ", *[b"x" * 1000] * 400, b"\n\n"):
            most = max(most, budget.num_bytes)
            yield piece

    log.push(events(3))
    log.push_slowly(chunks())
    log.push(events(1, 4))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.make)
        await log.wait_made()
        nursery.cancel_scope.cancel()
    log.finish()
    assert most <= 51_000 and (log.first, log.num_events) == (4, 5)
    assert b"".join([chunk async for chunk in log.read(4, 1.0)]) == events(1, 4)
    (told,) = [chunk async for chunk in log.read(0, 1.0)]
    assert b'"code":"events_dropped"' in told
    log.forget()
    assert budget.num_bytes == 0


async def test_logs_share_a_budget() -> None:
    """All logs together are bounded, and who writes drops its own oldest events."""
    budget = LogBudget(10_000)
    logs = [EventLog(budget) for _ in range(5)]
    for number in range(100):
        for log in logs:
            log.push(events(1, number))
    assert budget.num_bytes <= 10_000
    for log in logs:
        log.forget()
    assert budget.num_bytes == 0


async def test_heartbeats(autojump_clock: trio.testing.MockClock) -> None:
    """A reader of a silent log gets heartbeats, and what is held back only when it is released."""
    log = EventLog(LogBudget())
    reader = log.read(0, 15.0)
    assert await reader.__anext__() == PING
    log.push(events(1))
    log.hold()
    log.push(events(1, 1))
    log.finish()
    assert await reader.__anext__() == events(1)
    assert await reader.__anext__() == PING
    log.release_held()
    assert [chunk async for chunk in reader] == [events(1, 1)]
