"""Grammars are checked in processes: results, turns, and processes that die, hang or are no longer needed.

The pool's decisions are tested with fake processes; the last tests use real ones.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.fleet.forks.fork_server import ForkServer
from quipu.actors.grammars.grammar_check import GrammarChecker
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from quipu.actors.messages.outcomes import ErrorKind, RequestError
from quipu.actors.shared.fair_queue import QueueFull
from quipu.actors.text_workers import grammar_pool
from quipu.actors.text_workers.grammar_pool import (
    FIRST_LANE_S,
    GRACE_S,
    IDLE_S,
    SMALL_CHARACTERS,
    UNAVAILABLE,
    GrammarPool,
)
from quipu.actors.text_workers.grammar_process import GrammarProcess, ProcessGone
from quipu.actors.text_workers.grammar_worker import WorkerSettings
from quipu.actors.tokenizer.prompt_encoder import EncodingOptions
from tests.grammars import EOS, PARAM, UNION, endless_later, regex, schema, tiny_grammars
from tests.processes import eventually, has_ended
from tests.tiny import TINY

SETTINGS = WorkerSettings((EOS,), 99_999, 30.0)
SOURCE = (TINY / "tokenizer.json").read_bytes()
FIELDS = {f"p{number}": {"type": "integer"} for number in range(120)}
LARGE = schema({"type": "object", "properties": FIELDS})
REFUSED = schema({"type": "object", "properties": {**FIELDS, "q": {"not": {}}}})


def asker(tenant: str, salt: str = "") -> EncodingOptions:
    return EncodingOptions(tenant, PARAM, owner=tenant + salt)


def large(number: int) -> GrammarSpec:
    return regex(str(number) * SMALL_CHARACTERS + "x")


@attrs.define(eq=False)
class Dials:
    """How the fake processes of a test behave, and what they have done."""

    servers: list[FakeServer] = attrs.field(factory=list)
    started: list[FakeProcess] = attrs.field(factory=list)
    checked: list[str] = attrs.field(factory=list)
    """The first characters of the grammars, in order."""
    limits_s: list[float] = attrs.field(factory=list)
    running: int = 0
    is_held: bool = False
    """Whether checks wait until they are cancelled."""
    not_held: set[str] = attrs.field(factory=set)
    """Sources of grammars that are checked nevertheless."""
    deaths: list[int | None] = attrs.field(factory=list)
    """Exit codes with which the next checks end."""
    refuses_to_start: bool = False


@attrs.define(eq=False)
class FakeServer:
    """Stands for a `ForkServer`."""

    is_usable: bool = True

    def end(self) -> None:
        self.is_usable = False


@attrs.define(eq=False)
class FakeProcess:
    """Stands for a `GrammarProcess`."""

    dials: Dials
    pid: int
    is_usable: bool = True
    has_ended: bool = False

    async def check(self, spec: GrammarSpec, limit_s: float, timeout_s: float) -> str | RequestError:
        self.dials.checked.append(spec.source[0])
        self.dials.limits_s.append(limit_s)
        self.is_usable = False
        self.dials.running += 1
        try:
            with trio.move_on_after(timeout_s):
                while self.dials.is_held and spec.source not in self.dials.not_held:
                    await trio.sleep(0.1)
            if self.dials.is_held and spec.source not in self.dials.not_held:
                raise ProcessGone(None)
            if self.dials.deaths:
                raise ProcessGone(self.dials.deaths.pop(0))
        finally:
            self.dials.running -= 1
        self.is_usable = True
        return f"text {spec.source[0]}"

    async def end(self) -> None:
        self.has_ended, self.is_usable = True, False


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dials]:
    dials = Dials()

    class Starting:
        @staticmethod
        async def start(server: FakeServer) -> FakeProcess:
            if dials.refuses_to_start:
                raise OSError
            dials.started.append(FakeProcess(dials, len(dials.started)))
            return dials.started[-1]

    def start_server(*_: bytes) -> FakeServer:
        dials.servers.append(FakeServer())
        return dials.servers[-1]

    monkeypatch.setattr(grammar_pool, "GrammarProcess", Starting)
    monkeypatch.setattr(grammar_pool, "_start", start_server)
    yield dials
    assert not any(server.is_usable for server in dials.servers)
    assert all(process.has_ended for process in dials.started)


def pool_of() -> GrammarPool:
    return GrammarPool(SOURCE, SETTINGS)


async def with_pool(work: Callable[[GrammarPool, trio.Nursery], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        pool = pool_of()
        await nursery.start(pool.run)
        await pool._running_server()  # noqa: SLF001 -- a thread starts it, for which `until_blocked` does not wait
        await work(pool, nursery)
        nursery.cancel_scope.cancel()


async def until_blocked() -> None:
    await trio.testing.wait_all_tasks_blocked(0.001)


async def test_small_grammars_do_not_wait_for_large_ones(dials: Dials) -> None:
    """A small grammar is checked even while every process for large ones is busy, and its result is kept."""

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        dials.is_held = True
        for number in range(4):
            nursery.start_soon(pool.check, large(number), asker(f"tenant {number}"))
        await until_blocked()
        assert dials.running == 2
        small = regex("a" * SMALL_CHARACTERS)
        dials.not_held.add(small.source)
        assert await pool.check(small, asker("tenant 0")) == "text a" == pool.known(small, asker("tenant 0"))
        assert dials.running == 2

    await with_pool(work)


async def test_small_grammar_that_takes_long(dials: Dials) -> None:
    """A small grammar that takes long is ended soon and checked again like a large one; if it takes too long there, it
    is refused for good."""

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        dials.deaths = [-signal.SIGPROF]
        assert await pool.check(regex("a"), asker("tenant")) == "text a"
        assert dials.limits_s == [FIRST_LANE_S, SETTINGS.max_seconds + GRACE_S]
        dials.deaths = [-signal.SIGPROF] * 2
        refused = await pool.check(regex("b"), asker("tenant"))
        assert isinstance(refused, RequestError) and "it takes too long to compile" in refused.message
        assert pool.known(regex("b"), asker("tenant")) == refused and dials.checked == ["a", "a", "b", "b"]

    await with_pool(work)


async def test_results_are_a_tenants_own(dials: Dials) -> None:
    """A grammar is checked again for another tenant or salt, so that timing does not tell who has used it."""

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        for tenant in ("a", "b", "a"):
            assert await pool.check(large(1), asker(tenant)) == "text 1"
            assert pool.known(large(1), asker(tenant)) == "text 1" and pool.known(large(1), asker("c")) is None
        await pool.check(large(1), asker("a", "salt"))
        assert dials.checked == ["1", "1", "1"]

    await with_pool(work)


async def test_tenants_take_turns(dials: Dials, mock_clock: trio.testing.MockClock) -> None:
    """One tenant's grammars occupy one process of two, and another tenant's do not wait for all of them."""

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        dials.is_held = True
        for number in (1, 2, 3):
            nursery.start_soon(pool.check, large(number), asker("many"))
            await until_blocked()
        assert dials.checked == ["1"] and len(dials.started) == 1
        for number in (7, 8):
            nursery.start_soon(pool.check, large(number), asker("few"))
            await until_blocked()
        assert dials.checked == ["1", "7"] and dials.running == 2
        dials.is_held = False
        mock_clock.jump(1)
        await until_blocked()
        assert sorted(dials.checked) == ["1", "2", "3", "7", "8"] and len(dials.started) == 2

    await with_pool(work)


async def test_one_check_of_equal_grammars(dials: Dials) -> None:
    """Requests that wait with the same grammar have it checked once; one whose client has left is not checked."""
    seen: list[str | RequestError] = []

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        async def ask(number: int) -> None:
            seen.append(await pool.check(large(number), asker("tenant")))

        dials.is_held = True
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as leaving:
                leaving.start_soon(ask, 1)
                await until_blocked()
                leaving.start_soon(ask, 2)
                await until_blocked()
                scope.cancel()
        for _ in range(5):
            nursery.start_soon(ask, 1)
        await until_blocked()
        dials.is_held = False
        with trio.fail_after(30):
            while len(seen) < 5:
                await trio.sleep(0.01)
        assert seen == ["text 1"] * 5 and dials.checked == ["1"]

    await with_pool(work)


@pytest.mark.parametrize(
    ("exit_code", "error"),
    [
        (-signal.SIGPROF, "it takes too long to compile"),
        (-signal.SIGSEGV, "it ends the process that compiles it"),
        (-signal.SIGABRT, "it ends the process that compiles it"),
        (-signal.SIGKILL, "could not be checked"),
        (1, "could not be checked"),
    ],
)
async def test_process_that_dies(dials: Dials, exit_code: int, error: str) -> None:
    """A grammar that ends its process is refused and not tried again; the next grammar gets a new process."""
    dials.deaths = [exit_code]

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        result = await pool.check(large(1), asker("tenant"))
        assert isinstance(result, RequestError) and error in result.message
        is_known = result.kind is ErrorKind.INVALID
        assert (pool.known(large(1), asker("tenant")) is not None) == is_known and (result is UNAVAILABLE) != is_known
        assert await pool.check(large(2), asker("tenant")) == "text 2"
        assert [process.has_ended for process in dials.started] == [True, False]

    await with_pool(work)


async def test_idle_process_that_dies(dials: Dials) -> None:
    """A process that was idle may already be dead: its grammar gets another one, once."""

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        await pool.check(large(1), asker("tenant"))
        dials.started[0].is_usable = False
        assert await pool.check(large(2), asker("tenant")) == "text 2" and len(dials.started) == 2
        dials.deaths = [-signal.SIGKILL]
        assert await pool.check(large(3), asker("tenant")) == "text 3" and len(dials.started) == 3
        dials.deaths = [-signal.SIGKILL] * 2
        assert await pool.check(large(4), asker("tenant")) is UNAVAILABLE and len(dials.started) == 4

    await with_pool(work)


async def test_process_that_hangs(dials: Dials, autojump_clock: trio.testing.MockClock) -> None:
    """A process that does not answer is killed in the end, and its client may try again."""

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        dials.is_held = True
        assert await pool.check(large(1), asker("tenant")) is UNAVAILABLE
        assert trio.current_time() > SETTINGS.max_seconds
        assert dials.started[0].has_ended and pool.known(large(1), asker("tenant")) is None
        dials.is_held = False
        assert await pool.check(large(1), asker("tenant")) == "text 1"
        dials.is_held = True
        assert await pool.check(large(2), asker("tenant")) is UNAVAILABLE and len(dials.started) == 2

    await with_pool(work)


async def test_no_process_can_be_started(dials: Dials) -> None:
    """Large grammars get a 503 until a process can be started."""

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        dials.refuses_to_start = True
        assert await pool.check(large(1), asker("tenant")) is UNAVAILABLE
        dials.refuses_to_start = False
        assert await pool.check(large(1), asker("tenant")) == "text 1"

    await with_pool(work)


async def test_idle_processes_end(dials: Dials, autojump_clock: trio.testing.MockClock) -> None:
    """A process that is not needed for long ends."""

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        await pool.check(large(1), asker("tenant"))
        assert pool.idle_process_ids == [0]
        await trio.sleep(IDLE_S / 2 + 1)
        assert pool.idle_process_ids == [0]
        await trio.sleep(IDLE_S)
        assert pool.idle_process_ids == [] and dials.started[0].has_ended

    await with_pool(work)


async def test_queue_is_bounded(dials: Dials, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with too many waiting grammars is told to come back."""
    monkeypatch.setattr(grammar_pool, "MAX_WAITING", 4)

    async def work(pool: GrammarPool, nursery: trio.Nursery) -> None:
        dials.is_held = True
        for number in range(3):
            nursery.start_soon(pool.check, large(number), asker("many"))
            await until_blocked()
        with pytest.raises(QueueFull):
            await pool.check(large(3), asker("many"))

    await with_pool(work)


# ---------------------------------------------------------------- real processes


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer.start(grammar_pool.MODULE, SOURCE, json.dumps(attrs.asdict(SETTINGS)).encode(), niceness=5)
    yield server
    server.end()


async def test_real_process(server: ForkServer) -> None:
    """A real process has the same results, runs at a low priority, and can be killed at any time, even if it hangs."""
    here = GrammarChecker(tiny_grammars(), SETTINGS.max_bytes)
    process = await GrammarProcess.start(server)
    for spec in (LARGE, REFUSED, regex("\ud800" + "a" * SMALL_CHARACTERS), regex("x" * 100_000)):
        assert await process.check(spec, 30.0, 60.0) == here.check(spec)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ProcessGone) as gone:
        await process.check(LARGE, 30.0, 0.1)
    assert gone.value.exit_code is None and gone.value.verdict(LARGE) is None and not process.is_usable
    await process.end()
    assert has_ended(process.pid)


@pytest.mark.parametrize("source", ['start: /a+/ "ab"', 'start: /[a-z ]{4}/ /a+/ "ab"'])
async def test_real_process_at_its_limit(server: ForkServer, source: str) -> None:
    """The kernel ends a process that computes forever, while it compiles or while it draws tokens."""
    process = await GrammarProcess.start(server)
    endless = GrammarSpec(GrammarKind.LARK, source, "structured_outputs.grammar")
    with pytest.raises(ProcessGone) as gone:
        await process.check(endless, 0.05, 60.0)
    refused = gone.value.verdict(endless)
    assert refused is not None and "too long" in refused.message and has_ended(process.pid)
    await process.end()


async def test_processes_that_end_together() -> None:
    """When the process that forks is killed with all that it has forked, the next grammar is checked all the same."""
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            pool = GrammarPool(SOURCE, SETTINGS)
            await nursery.start(pool.run)
            assert isinstance(await pool.check(schema(UNION), asker("tenant")), str)
            (pid,) = pool.idle_process_ids
            group = os.getpgid(pid)
            os.killpg(group, signal.SIGKILL)
            eventually(lambda: has_ended(pid) and has_ended(group), "all of them have ended")
            assert isinstance(await pool.check(LARGE, asker("tenant")), str)
            nursery.cancel_scope.cancel()


async def test_endless_grammars_leave_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless grammars are refused, others are checked beside them, and no process is left at the end."""
    monkeypatch.setattr(grammar_pool, "GRACE_S", 0.05)
    # on a busy machine, a process of low priority may have to wait very long for its processor time
    monkeypatch.setattr(grammar_pool, "NICENESS", 0)
    monkeypatch.setattr(grammar_pool, "TIMEOUT_S", 90.0)
    settings = attrs.evolve(SETTINGS, max_seconds=0.05)
    results: dict[str, str | RequestError] = {}
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            pool = GrammarPool(SOURCE, settings)
            await nursery.start(pool.run)

            async def ask(name: str, spec: GrammarSpec, tenant: str) -> None:
                results[name] = await pool.check(spec, asker(tenant))

            async with trio.open_nursery() as asking:
                for number in range(6):
                    asking.start_soon(ask, f"endless {number}", endless_later(f"[a-c]{{{number}}}"), "hostile")
                asking.start_soon(ask, "good", schema(UNION), "tenant")
            pids = pool.idle_process_ids
            nursery.cancel_scope.cancel()
    assert isinstance(results.pop("good"), str)
    assert len(results) == 6
    assert all(isinstance(one, RequestError) and "too long" in one.message for one in results.values())
    eventually(lambda: all(has_ended(pid) for pid in pids), "no process is left")
