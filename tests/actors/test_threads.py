"""Waiting until a thread can be started, if the machine is short of threads or of memory for a moment."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from quipu.actors import threads
from quipu.actors.threads import is_out_of_memory, open_process, outlive_shortages, run_in_thread, start_thread
from tests.actors.thread_shortage import Shortage

ROOT = Path(__file__).resolve().parents[2]


async def test_shortage_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call runs once, with its arguments, as soon as a thread can be started."""
    shortage = Shortage(monkeypatch, RuntimeError("can't start new thread"), MemoryError(), *[MemoryError()] * 3)
    calls: list[int] = []
    await run_in_thread(calls.append, 7)
    assert calls == [7] and shortage.num_tries == 6


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), ValueError("no")])
async def test_what_a_call_raises_is_raised(error: Exception) -> None:
    """A call that has begun is not repeated, even if its own threads or its memory were short."""
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise error if len(calls) == 1 else AssertionError("the call must not be repeated")

    with pytest.raises(type(error)):
        await run_in_thread(fail)
    assert calls == [1]


async def test_other_errors_of_starting_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong use of trio is not taken for a shortage."""
    Shortage(monkeypatch, RuntimeError("must be called from async context"))
    with pytest.raises(RuntimeError, match="async context"):
        await run_in_thread(int)


async def test_wait_ends_with_its_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a thread can be cancelled, and takes no token of a limiter."""
    limiter = trio.CapacityLimiter(1)
    shortage = Shortage(monkeypatch, *[RuntimeError("can't start new thread")] * 1000)
    monkeypatch.setattr(threads, "FIRST_PAUSE_S", 1000.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: run_in_thread(int, limiter=limiter))
        await trio.testing.wait_all_tasks_blocked()
        assert shortage.num_tries == 1 and not limiter.borrowed_tokens
        nursery.cancel_scope.cancel()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "FIRST_PAUSE_S", 0.0)


@pytest.mark.usefixtures("no_pauses")
async def test_processes_wait_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is started once there is a thread to start it; a lack of memory for it is an OSError."""
    shortage = Shortage(monkeypatch, *[RuntimeError("can't start new thread")] * 3)
    process = await open_process([sys.executable, "-c", "raise SystemExit(7)"])
    assert await process.wait() == 7 and shortage.num_tries == 4
    Shortage(monkeypatch, MemoryError())
    with pytest.raises(OSError, match="memory"):
        await open_process([sys.executable, "-c", ""])
    Shortage(monkeypatch, RuntimeError("must be called from async context"))
    with pytest.raises(RuntimeError, match="async context"):
        await open_process([sys.executable, "-c", ""])


@pytest.mark.usefixtures("no_pauses")
async def test_threads_of_their_own_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread is started as soon as the machine has one, and runs once."""
    errors, start, has_run = [RuntimeError("can't start new thread"), MemoryError()], threading.Thread.start, []

    def start_or_fail(thread: threading.Thread) -> None:
        if errors:
            raise errors.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    thread = await start_thread(lambda: has_run.append(1), "of its own")
    thread.join()
    assert has_run == [1] and not errors


async def test_tasks_outlive_shortages(autojump_clock: trio.abc.Clock) -> None:
    """A task that ran out of memory, with or without a group around the error, is run again; other errors end it."""
    errors = [MemoryError(), ExceptionGroup("two", [MemoryError(), MemoryError()]), KeyError("other")]

    async def run() -> None:
        await trio.lowlevel.checkpoint()
        raise errors.pop(0)

    with capture_logs() as lines, pytest.raises(KeyError):
        await outlive_shortages(run, "a task")
    assert [line["task"] for line in lines] == ["a task"] * 2
    assert not is_out_of_memory(ExceptionGroup("mixed", [MemoryError(), KeyError()]))


def test_threads_and_processes_are_started_in_one_place() -> None:
    """Nothing else calls trio's functions, which raise if threads are short. (HTTP passes one on to applications.)"""
    users = {
        str(path.relative_to(ROOT))
        for folder in ("actors", "web")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"trio\.to_thread|trio\.lowlevel\.open_process|trio\.run_process", path.read_text())
    }
    assert users == {"actors/threads.py", "web/http/http11.py"}
