"""The processes that make reports: how many there are, when they end, and what clients get if one fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import sqlalchemy as sa
import trio
import trio.testing
from structlog.testing import capture_logs

from quipu.actors.ledger.database import make_engine, migrate
from quipu.actors.ledger.reading import Query
from quipu.web.api.admin import report_worker
from quipu.web.api.admin.report_process import ReportProcess
from quipu.web.api.admin.reports import FirstRecord, Report
from quipu.web.api.admin.usage_source import IDLE_S, LedgerUsage, open_usage
from quipu.web.request.errors import APIError
from quipu.web.ui.table_report import TableReport, Wanted, pack_prices
from tests.postgres import Postgres
from tests.processes import has_ended
from tests.web.api.admin.usage_books import MIDNIGHT, copy_database, make_database, record_at

PATIENCE_S = 100.0
"""How long a test waits for a process, which yields to everything else on the machine."""
pytestmark = pytest.mark.timeout(4 * PATIENCE_S)
OPS = "ops"
"""The tenant that asks, where it does not matter which."""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with an empty database."""
    folder = tmp_path_factory.mktemp("ledger") / "data"
    make_database(folder)
    return folder


@attrs.frozen
class Pickled:
    """An object that is unpickled as a report in the process that makes it, which cannot import tests."""

    code: str

    def __reduce__(self) -> Any:
        return eval, (f"__import__('types').SimpleNamespace(make=lambda ledger: {self.code})",)


def running(code: str) -> Report:
    """Return a report whose body is the value of an expression of `ledger`."""
    return cast(Report, Pickled(code))


FIRST = FirstRecord(Query())
PID = running("str(__import__('os').getpid()).encode()")


class Gate:
    """A named pipe that holds up reports."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gate"
        os.mkfifo(self._path)
        self.report = running(f"open({str(self._path)!r}, 'rb').read() or b'{{}}'")

    def let_through(self) -> bool:
        """Release the reports that wait at the moment; return whether there were any."""
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    def holds_up_one(self) -> bool:
        """Return whether a report waits; from then on it waits until the gate is left."""
        try:
            self._end = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)  # kept open: its reader waits for more
        except OSError:
            return False
        return True

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_end"):
            os.close(self._end)


def opened(data_dir: Path, url: str | None = None, **options: Any) -> AbstractAsyncContextManager[LedgerUsage]:
    """Open a source whose deadline is no shorter than the test's own."""
    return open_usage(data_dir, url, **{"read_s": PATIENCE_S, **options})


async def wait_until(look: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not look():
            await trio.sleep(0.01)


def children() -> set[int]:
    """Return the child processes that have not ended."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # that thread has just ended
            found.update(map(int, path.read_text().split()))
    return {pid for pid in found if not has_ended(pid)}


async def body_of(usage: LedgerUsage, report: Any) -> bytes:
    return b"".join(await usage.report(report, OPS))


async def error_of(usage: LedgerUsage, report: Any) -> APIError:
    with pytest.raises(APIError) as get_error:
        await usage.report(report, OPS)
    return get_error.value


async def test_started_when_needed_and_used_again(data_dir: Path) -> None:
    """There is no process before the first report, the next report uses the same one, and it ends with the server."""
    before = children()
    async with opened(data_dir) as usage:
        assert not children() - before
        assert await body_of(usage, FIRST) == b"null"
        pid = int(await body_of(usage, PID))
        assert usage.idle_process_ids == [pid] == [int(await body_of(usage, PID))]
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    assert has_ended(pid)


async def test_idle_process_ends(data_dir: Path, mock_clock: trio.testing.MockClock) -> None:
    """A process that has been idle for long ends, and a report afterwards starts another one."""
    async with opened(data_dir) as usage:
        pid = int(await body_of(usage, PID))
        mock_clock.jump(2 * IDLE_S)
        while usage.idle_process_ids or not has_ended(pid):
            await trio.testing.wait_all_tasks_blocked(0.01)  # the clock stands still
        assert int(await body_of(usage, PID)) != pid


async def test_reports_are_limited(data_dir: Path, tmp_path: Path) -> None:
    """Two reports are made at a time, four wait, and the next is refused at once."""
    gate = Gate(tmp_path)
    before = children()
    num_answered = most = 0
    async with opened(data_dir, num_processes=2, max_waiting=4) as usage:

        async def read() -> None:
            nonlocal num_answered
            assert await body_of(usage, gate.report) == b"{}"
            num_answered += 1

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(read)
            await wait_until(lambda: usage.num_open == 6)
            await trio.testing.wait_all_tasks_blocked()  # each has its place, or waits for it
            error = await error_of(usage, FIRST)
            assert (error.status, error.code, num_answered) == (503, "too_many_reports", 0)
            with trio.fail_after(PATIENCE_S):
                while num_answered < 6:
                    gate.let_through()
                    most = max(most, len(children() - before))
                    await trio.sleep(0.01)
    assert most == 2


async def test_tenants_take_turns(data_dir: Path, tmp_path: Path) -> None:
    """A tenant with many reports is refused more of them, and keeps another tenant's waiting for one at most."""
    gate = Gate(tmp_path)
    answered: list[str] = []
    async with opened(data_dir, max_waiting=5) as usage:

        async def read(report: Report, tenant: str) -> None:
            await usage.report(report, tenant)
            answered.append(tenant)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(read, gate.report, "acme")
            await wait_until(lambda: usage.num_open == 6)
            await trio.testing.wait_all_tasks_blocked()  # each has its place, or waits for it
            with pytest.raises(APIError, match="Too many usage reports"):
                await usage.report(FIRST, "acme")
            nursery.start_soon(read, FIRST, OPS)
            await wait_until(lambda: usage.num_open == 7)
            await wait_until(gate.let_through)
            await wait_until(lambda: OPS in answered)
            assert answered == ["acme", OPS]
            with trio.fail_after(PATIENCE_S):
                while len(answered) < 7:
                    gate.let_through()
                    await trio.sleep(0.01)


async def test_deadline(data_dir: Path, tmp_path: Path) -> None:
    """A client gets its response at the deadline, and its report is abandoned."""
    gate = Gate(tmp_path)
    before = children()
    async with opened(data_dir, read_s=0.05) as usage:
        for _ in range(2):
            error = await error_of(usage, gate.report)
            assert (error.status, error.code) == (503, "ledger_unavailable")
        await wait_until(lambda: usage.num_open == 0)
        assert not children() - before and not usage.idle_process_ids


async def test_client_leaves(data_dir: Path, tmp_path: Path) -> None:
    """If a client leaves, the process of its report ends, and reports that wait are not made; the next client gets
    another process."""
    with Gate(tmp_path) as gate:
        async with opened(data_dir) as usage:
            pid = int(await body_of(usage, PID))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(usage.report, gate.report, OPS)
                nursery.start_soon(usage.report, FIRST, OPS)
                await wait_until(gate.holds_up_one)
                nursery.cancel_scope.cancel()
            await wait_until(lambda: usage.num_open == 0)
            assert has_ended(pid)
            assert int(await body_of(usage, PID)) != pid


async def test_query_of_a_client_that_leaves(postgres: Postgres, tmp_path: Path) -> None:
    """If a client leaves, its query is stopped on the database server."""
    url = postgres.new_database()
    engine = make_engine(url)
    migrate(engine)
    asleep = sa.text("SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT pg_sleep%'")

    def num_asleep() -> int:
        with engine.connect() as connection:
            return int(connection.scalar(asleep) or 0)

    sleeping = running("[c.__enter__().exec_driver_sql('SELECT pg_sleep(600)') for c in [ledger.connection()]]")
    (tmp_path / "ledger").mkdir()
    async with opened(tmp_path, url) as usage:
        assert await body_of(usage, FIRST) == b"null"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(usage.report, sleeping, OPS)
            await wait_until(num_asleep)
            nursery.cancel_scope.cancel()
        await wait_until(lambda: usage.num_open == 0)
        await wait_until(lambda: not num_asleep())
    engine.dispose()


async def test_process_dies(data_dir: Path) -> None:
    """If a process dies while it makes a report, only the client of that report gets a 503."""
    async with opened(data_dir) as usage:
        with capture_logs() as lines:
            error = await error_of(usage, running("__import__('os')._exit(3)"))
        assert (error.status, error.code) == (503, "ledger_unavailable")
        assert "exit code 3" in lines[0]["why"]
        pid = int(await body_of(usage, PID))
        os.kill(pid, 9)
        await wait_until(lambda: has_ended(pid))
        assert int(await body_of(usage, PID)) != pid, "a process that died while idle must fail no report"


@pytest.mark.parametrize(
    ("code", "status", "error_code"),
    [
        ("1 / 0", 500, "internal_error"),
        (f"bytes({2 * report_worker.MEMORY_BYTES})", 400, "report_too_large"),
        (f"bytes({report_worker.MAX_BODY_BYTES + 1})", 400, "report_too_large"),
    ],
)
async def test_report_fails(data_dir: Path, code: str, status: int, error_code: str) -> None:
    """A report that fails is an error of its request only, and the same process makes the next one."""
    async with opened(data_dir) as usage:
        pid = int(await body_of(usage, PID))
        with capture_logs() as lines:
            error = await error_of(usage, running(code))
        assert (error.status, error.code) == (status, error_code)
        assert [line["error"] for line in lines] == (["ZeroDivisionError at <string>:1"] if status == 500 else [])
        assert int(await body_of(usage, PID)) == pid


async def test_cannot_start(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no process can be started the response is a 503."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    async with opened(data_dir) as usage:
        assert (await error_of(usage, FIRST)).code == "ledger_unavailable"

        async def start(where: object) -> None:
            await trio.lowlevel.checkpoint()
            raise MemoryError

        monkeypatch.setattr(ReportProcess, "start", start)
        assert (await error_of(usage, FIRST)).code == "ledger_unavailable"
        assert usage.num_open == 0


async def test_disputed_records(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has the newest records of disputed accounts, and only those that match."""
    records = [record_at(number, f"r{number}", disputed=number % 2 == 1) for number in range(8)]
    records.append(record_at(9, "of-b", tenant="b", disputed=True))
    wanted = Wanted(Query(since=MIDNIGHT + 2, tenants=("acme",)), (), None, is_csv=False)
    async with opened(copy_database(data_dir, tmp_path / "data", records)) as usage:
        table = await body_of(usage, TableReport(wanted, pack_prices(None)))
    names = [table.index(f'"{name}"'.encode()) for name in ("r7", "r5", "r3")]
    assert names == sorted(names) and table.count(b'"request_id"') == 3


def test_what_a_process_loads() -> None:
    """The process that reads the ledger loads no web framework, no event loop and no torch, so it starts quickly."""
    code = (
        "import sys, quipu.web.api.admin.report_worker, quipu.web.ui.table_report, "
        "quipu.web.api.admin.usage_report; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"quart", "trio", "structlog", "torch", "numpy", "hypercorn"} & set(done.stdout.split())
