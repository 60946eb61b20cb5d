"""A moment without a free thread, or without the memory for one, is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from quipu.actors import threads
from quipu.actors.threads import run_in_thread
from tests.actors.thread_shortage import Shortage

ROOT = Path(__file__).resolve().parents[2]


async def test_shortage_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call runs once, with its arguments, as soon as there is a thread."""
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
        raise error

    with pytest.raises(type(error)):
        await run_in_thread(fail)
    assert calls == [1]


async def test_other_errors_of_starting_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong use of trio is not taken for a shortage."""
    Shortage(monkeypatch, RuntimeError("must be called from async context"))
    with pytest.raises(RuntimeError, match="async context"):
        await run_in_thread(int)


async def test_wait_ends_with_its_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a thread can be cancelled, and holds nothing of a limiter meanwhile."""
    limiter = trio.CapacityLimiter(1)
    shortage = Shortage(monkeypatch, *[RuntimeError("can't start new thread")] * 1000)
    monkeypatch.setattr(threads, "FIRST_PAUSE_S", 1000.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: run_in_thread(int, limiter=limiter))
        await trio.testing.wait_all_tasks_blocked()
        assert shortage.num_tries == 1 and not limiter.borrowed_tokens
        nursery.cancel_scope.cancel()


def test_threads_are_started_in_one_place() -> None:
    """Nothing else calls trio's own function, whose shortages end tasks. (HTTP passes it on to applications.)"""
    users = {
        str(path.relative_to(ROOT))
        for folder in ("actors", "web")
        for path in (ROOT / folder).rglob("*.py")
        if "trio.to_thread" in path.read_text()
    }
    assert users == {"actors/threads.py", "web/http/http11.py"}
