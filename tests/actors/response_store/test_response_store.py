"""The store of a running server: its threads, its faults and its house."""

from __future__ import annotations

import resource
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from quipu.actors.response_store import response_store
from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.response_store import (
    CALL_S,
    EXPIRE_EVERY_S,
    ResponseStore,
    StoreConfig,
    StoreGauges,
    open_store,
)
from quipu.actors.response_store.store_file import open_file
from quipu.actors.response_store.stored import (
    Kind,
    NewObject,
    PageQuery,
    State,
    StoredItem,
    StoreError,
    StoreUnavailable,
)
from tests.actors.response_store.stores import Clock, bytes_on_disk
from tests.runtimes import eventually

TEXT = "this must not be found"


def config(folder: Path, **changes: Any) -> StoreConfig:
    return StoreConfig(data_dir=folder, **{"ttl_s": 100.0, **changes})


def new(name: str = "a", text: str = TEXT, **changes: Any) -> NewObject:
    items = [StoredItem(f"{name}-0", text.encode())]
    return NewObject(object_id=name, tenant="t", kind=Kind.RESPONSE, created_at=1, head=b"{}", items=items, **changes)


async def find(store: ResponseStore, name: str = "a") -> Any:
    return await store.call(ObjectTables.find, "t", Kind.RESPONSE, name)


async def test_survives_a_restart(tmp_path: Path) -> None:
    """What one server has stored the next one finds."""
    async with open_store(config(tmp_path)) as store:
        assert await store.call(ObjectTables.begin, new())
    async with open_store(config(tmp_path)) as store:
        assert (await find(store)).state is State.WHOLE


async def test_lost_responses_are_told(tmp_path: Path) -> None:
    """A background response that was open when the server stopped is lost, and the log says how many are."""
    async with open_store(config(tmp_path)) as store:
        await store.call(ObjectTables.begin, new(is_open=True, is_background=True))
    with capture_logs() as lines:
        async with open_store(config(tmp_path)) as store:
            assert (await find(store)).state is State.LOST
    assert [(line["event"], line["num_responses"]) for line in lines] == [("response_store.recovered", 1)]


@pytest.fixture
def busy_house(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep house without a pause."""
    monkeypatch.setattr(response_store, "EXPIRE_EVERY_S", 0.0)
    monkeypatch.setattr(response_store, "RETRY_S", 0.0)


@pytest.mark.usefixtures("busy_house")
async def test_expiry_leaves_no_trace(tmp_path: Path) -> None:
    """What has expired is deleted from the files without anybody asking for it."""
    clock = Clock()
    async with open_store(config(tmp_path), unix_time=clock) as store:
        await store.call(ObjectTables.begin, new())
        assert TEXT.encode() in bytes_on_disk(tmp_path)
        clock.now += 101
        await eventually(lambda: TEXT.encode() not in bytes_on_disk(tmp_path), "nothing is left of it")
        assert store.num_expired == 1


class Gate:
    """A method of the tables that waits in its thread until the test lets it go."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, tables: ObjectTables) -> bool:
        self.entered.set()
        assert self.leave.wait(60)
        return tables.begin(new())


async def test_slow_disk(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """A call that takes too long is given up, and changes nothing when it gets on; until then others fail at once."""
    gate = Gate()
    errors: list[StoreUnavailable] = []

    async def fail() -> None:
        with pytest.raises(StoreUnavailable) as error:
            await store.call(gate)
        errors.append(error.value)

    with capture_logs() as lines:
        async with open_store(config(tmp_path)) as store, trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            await trio.to_thread.run_sync(gate.entered.wait)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(CALL_S)
            await trio.testing.wait_all_tasks_blocked()
            assert errors and store.is_stuck and store.trouble is not None
            with pytest.raises(StoreUnavailable, match="does not respond"):
                await find(store)
            gate.leave.set()
            while store.is_stuck:
                await trio.lowlevel.checkpoint()
            assert await find(store) is None, "it was rolled back"
            assert store.trouble is None
            assert await store.call(ObjectTables.begin, new())
    events = [line["event"] for line in lines]
    assert events == ["response_store.unavailable", "response_store.back"]


async def test_hanging_commit(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """An object whose commit hangs until it is given up is deleted when the disk works again: nobody will end it."""
    committing, leave = threading.Event(), threading.Event()
    opened: list[sqlite3.Connection] = []
    statements: list[str] = []

    def hang(statement: str) -> None:
        statements.append(statement)
        if statement == "COMMIT" and any("INTO objects" in earlier for earlier in statements):
            committing.set()
            leave.wait(60)

    def open_kept(path: Path) -> sqlite3.Connection:
        opened.append(open_file(path))
        return opened[0]

    async def begin() -> None:
        with pytest.raises(StoreUnavailable):
            await store.call(ObjectTables.begin, new(is_open=True))

    with capture_logs():
        async with open_store(config(tmp_path), open_database=open_kept) as store, trio.open_nursery() as nursery:
            opened[0].set_trace_callback(hang)
            nursery.start_soon(begin)
            await trio.to_thread.run_sync(committing.wait)
            mock_clock.jump(CALL_S)
            while not store.is_stuck:
                await trio.lowlevel.checkpoint()
            leave.set()
            while store.is_stuck:
                await trio.lowlevel.checkpoint()
            mock_clock.jump(EXPIRE_EVERY_S)
            while store.num_leftovers:
                await trio.lowlevel.checkpoint()
            assert await find(store) is None and TEXT.encode() not in bytes_on_disk(tmp_path)


async def test_waiting_calls_are_given_up_too(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """Calls that wait for one that hangs fail at the same time, and nothing of them runs later."""
    gate = Gate()
    num_failed = 0

    async def fail(work: Callable[[ObjectTables], object]) -> None:
        nonlocal num_failed
        with pytest.raises(StoreUnavailable):
            await store.call(work)
        num_failed += 1

    async with open_store(config(tmp_path)) as store, trio.open_nursery() as nursery:
        nursery.start_soon(fail, gate)
        await trio.to_thread.run_sync(gate.entered.wait)
        for number in range(5):
            nursery.start_soon(fail, lambda tables, number=number: tables.begin(new(f"w{number}")))
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(CALL_S)
        await trio.testing.wait_all_tasks_blocked()
        assert num_failed == 6
        gate.leave.set()
        while store.is_stuck:
            await trio.lowlevel.checkpoint()
        for number in range(5):
            assert await find(store, f"w{number}") is None


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Let files grow to a size and no further, as on a disk that is full; called with the size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, old)


async def test_full_disk(tmp_path: Path, full_disk: Callable[[int], None]) -> None:
    """On a full disk what cannot be written is an error, what was stored stays, and all is well once there is room."""
    async with open_store(config(tmp_path)) as store:
        await store.call(ObjectTables.begin, new("before"))
        full_disk(200_000)
        with capture_logs() as lines, pytest.raises(StoreUnavailable, match="disk"):
            for number in range(100):
                await store.call(ObjectTables.begin, new(f"b{number}", "x" * 50_000))
        assert [line["event"] for line in lines] == ["response_store.unavailable"]
        assert await find(store, "before") is not None
        full_disk(resource.RLIM_INFINITY)
        assert await store.call(ObjectTables.begin, new("after", "x" * 50_000))
        assert await find(store, "after") is not None


async def test_read_only_file(tmp_path: Path) -> None:
    """A file that cannot be written is refused at the start."""

    def open_read_only(path: Path) -> sqlite3.Connection:
        connection = open_file(path)
        connection.execute("PRAGMA query_only=ON")
        return connection

    with pytest.raises(BaseExceptionGroup) as error:
        async with open_store(config(tmp_path), open_database=open_read_only):
            pass
    assert error.group_contains(StoreError, match="readonly")


async def test_damage_while_serving(tmp_path: Path) -> None:
    """A file that is damaged while it is open is an error of each call, not of the server."""
    opened: list[sqlite3.Connection] = []

    def open_known(path: Path) -> sqlite3.Connection:
        opened.append(open_file(path))
        return opened[0]

    async with open_store(config(tmp_path), open_database=open_known) as store:
        for number in range(50):
            await store.call(ObjectTables.begin, new(f"a{number}", TEXT * 500))
        await store.call(ObjectTables.delete, "t", Kind.RESPONSE, "a0")  # moves the log into the file
        path = tmp_path / "responses.sqlite3"
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)  # the first page is read again by every statement
            file.write(b"\xff" * (size - 4096))
        await store.call(lambda tables: opened[0].execute("PRAGMA shrink_memory"))
        with pytest.raises(StoreUnavailable):
            await store.call(ObjectTables.page, "t", Kind.RESPONSE, "a9", PageQuery(limit=100))
        assert store.trouble is not None


@pytest.mark.usefixtures("busy_house")
async def test_leftovers_are_deleted(tmp_path: Path) -> None:
    """What was begun and could not be completed is deleted once the database works again."""

    def open_breaking(path: Path) -> sqlite3.Connection:
        connection = open_file(path)
        denied = sqlite3.SQLITE_DENY
        connection.set_authorizer(lambda code, *_: denied if broken and code == sqlite3.SQLITE_DELETE else 0)
        return connection

    broken = False
    async with open_store(config(tmp_path), open_database=open_breaking) as store:
        await store.call(ObjectTables.begin, new(is_open=True))
        broken = True
        with capture_logs():
            store.discard("t", Kind.RESPONSE, "a")
            await eventually(lambda: store.trouble is not None, "the deletion fails")
            assert TEXT.encode() in bytes_on_disk(tmp_path)
            broken = False
            await eventually(lambda: TEXT.encode() not in bytes_on_disk(tmp_path), "it is deleted")
            assert await find(store) is None


async def test_gauges(tmp_path: Path) -> None:
    """The metrics say whether it works, how much is stored, and what was not."""
    async with open_store(config(tmp_path)) as store:
        await store.call(ObjectTables.begin, new(text="x" * 100_000))
        with capture_logs():
            store.note_unstored("because")
        store.num_running = lambda: 3
        samples = {sample.name: sample.value for metric in StoreGauges(store).collect() for sample in metric.samples}
    assert samples["quipu:response_store_up"] == 1 and samples["quipu:response_store_unstored_total"] == 1
    assert samples["quipu:response_store_bytes"] > 100_000
    assert samples["quipu:response_store_background_responses"] == 3


async def test_closes_after_the_last_thread(tmp_path: Path) -> None:
    """The database stays open while a thread uses it whose caller was cancelled: closing it there would be a crash."""
    begun, go_on = threading.Event(), threading.Event()
    results: list[Any] = []

    def look(tables: ObjectTables) -> None:
        begun.set()
        go_on.wait(10)
        results.append(tables.find("t", Kind.RESPONSE, "a"))

    async def leave() -> None:
        async with open_store(config(tmp_path)) as store:
            await store.call(ObjectTables.begin, new())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.call, look)
                await eventually(begun.is_set, "the thread has begun")
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        await eventually(begun.is_set, "the thread has begun")
        await trio.testing.wait_all_tasks_blocked(0.05)
        go_on.set()
    await eventually(lambda: len(results) == 1, "the thread has read")
    assert results[0] is not None and results[0].state is State.WHOLE
