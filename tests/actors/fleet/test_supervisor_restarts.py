"""Engines that cannot be restarted: which failures are retried, and which end the server."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio

from quipu import __version__
from quipu.actors.engine import engine_server
from quipu.actors.engine.engine import LoopHost
from quipu.actors.fleet.processes.greeting import greeting
from quipu.actors.fleet.processes.log_writer import LogWriter
from quipu.actors.fleet.processes.process_host import ProcessHost
from quipu.actors.fleet.supervisor import MAX_BACKOFF_S, Death, EngineGivenUp, EngineLink, EngineRefusal
from quipu.actors.request_desk.health import State
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.wiring import open_runtime
from tests.links import make_link
from tests.runtimes import kill_engine, runtime_config, serving_info, small_runtime

PROMPT = list(range(300, 340))
SHORTAGE = Death("no engine can be started: too many open files", is_shortage=True)
REFUSAL = Death("this checkpoint cannot be served: it is gone", hopeless=True)


def failing_host(deaths: list[Death]) -> Callable[..., LoopHost]:
    """Return a class of hosts whose starts end with `deaths`, in turn, and then succeed."""

    class FailingHost(LoopHost):
        async def run(self, link: EngineLink) -> Death:
            await trio.lowlevel.checkpoint()
            return deaths.pop(0) if deaths else await super().run(link)

    return FailingHost


async def test_shortage_at_a_restart(autojump_clock: trio.abc.Clock) -> None:
    """The start is retried with growing delays, however long it takes; health has the reason, and waiting requests are
    served."""
    deaths: list[Death] = []
    async with (
        small_runtime(make_host=failing_host(deaths), max_restarts=2, on_engine_death="fail") as client,
        trio.open_nursery() as nursery,
    ):
        deaths += [SHORTAGE] * 100
        kill_engine(client)
        with structlog.testing.capture_logs() as lines:
            assert (await client.ask(PROMPT)).error is not None
            nursery.start_soon(client.ask, PROMPT)
            began = trio.current_time()
            await trio.sleep(60)
            health = client.runtime.desk.health()
            assert health.state is State.RESTARTING and "too many open files" in health.detail
            while not client.runtime.desk.health().is_ready:
                await trio.sleep(1)
        assert 90 * MAX_BACKOFF_S < trio.current_time() - began <= 100 * MAX_BACKOFF_S + 1
        assert sum(line["event"] == "engine.not_started" for line in lines) == 100
        assert (await client.ask(PROMPT)).error is None


async def test_shortage_from_the_start(autojump_clock: trio.abc.Clock) -> None:
    """A server whose first engine cannot be started does not retry forever."""
    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="too many open files"), flatten_subgroups=True):
        config = runtime_config(max_restarts=2)
        host = failing_host([SHORTAGE] * 100)(config.engine)
        async with open_runtime(config, serving_info(config), lambda _: host, make_renderer=InlineRenderer):
            await trio.sleep(100)
            pytest.fail("the server must end")


async def test_refusals(autojump_clock: trio.abc.Clock) -> None:
    """A refusal is final before any engine was ready; later it is treated like any other death of an engine."""
    with pytest.RaisesGroup(EngineRefusal, flatten_subgroups=True):
        async with small_runtime(make_host=failing_host([REFUSAL])):
            pytest.fail("no engine may be ready")
    deaths: list[Death] = []
    async with small_runtime(make_host=failing_host(deaths), on_engine_death="fail") as client:
        deaths += [REFUSAL] * 2
        kill_engine(client)
        assert (await client.ask(PROMPT)).error is not None
        assert (await client.ask(PROMPT)).error is None
        assert client.runtime.desk.health().incarnation == 4


async def test_engines_that_do_not_load_during_a_search(autojump_clock: trio.abc.Clock) -> None:
    """Deaths while loading say nothing about a request, so they count as failed restarts, and the server gives up."""
    deaths: list[Death] = []
    with pytest.RaisesGroup(EngineGivenUp, flatten_subgroups=True):
        async with small_runtime(make_host=failing_host(deaths), max_restarts=4) as client:
            tickets = [client.open([*PROMPT, 400 + index]) for index in range(2)]
            for num_deaths in (1, 2):
                while not client.runtime.desk.health().is_ready:
                    await trio.sleep(0.01)
                kill_engine(client)
                for ticket in tickets if num_deaths == 1 else []:
                    await ticket.start()
                deaths += [Death("it does not load")] * (1000 * (num_deaths - 1))
                while client.runtime.desk.health().is_ready:
                    await trio.sleep(0.001)
            await trio.sleep(1000)
            pytest.fail("the server must end")


@pytest.mark.parametrize("what", ["sockets", "process"])
async def test_no_descriptors_for_a_process(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """An error of the operating system is a shortage, and leaves no socket open."""
    made: list[socket.socket] = []
    make_pair = socket.socketpair

    def socketpair(*args: Any) -> tuple[socket.socket, socket.socket]:
        if what == "sockets":
            raise OSError(errno.EMFILE, "Too many open files")
        made.extend(make_pair(*args))
        return made[0], made[1]

    async def open_process(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", socketpair)
    monkeypatch.setattr(trio.lowlevel, "open_process", open_process)
    host = ProcessHost(runtime_config().engine, {})
    death = await host.run(make_link())
    assert death.is_shortage and not death.hopeless and "Too many open files" in death.reason
    assert [its.fileno() for its in made] == ([] if what == "sockets" else [-1, -1])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "no memory"),
        OSError(errno.EMFILE, "no descriptors"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=repr,
)
def test_engine_that_has_no_room_to_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The engine ends with an exit code that says so, instead of refusing for good."""

    def load(config: object) -> None:
        raise error

    monkeypatch.setattr(engine_server, "load_executor", load)
    monkeypatch.setattr(engine_server, "_configure_log", lambda level: LogWriter(-1))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    ours, theirs = socket.socketpair()
    with ours:
        config = msgspec.json.encode(runtime_config().engine).decode()
        assert engine_server.main(["-1", str(theirs.detach()), "-1", "1", "1.0", "", config]) == os.EX_TEMPFAIL
        assert ours.recv(100) == greeting(__version__)
        assert ours.recv(1) == b"", "the engine must not have sent a refusal"


@pytest.mark.parametrize("error", [ImportError("no module named torch"), RuntimeError("a bug")], ids=repr)
def test_engine_that_fails_to_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An error that is not a shortage is raised, so that the log has its traceback."""

    def load(config: object) -> None:
        raise error

    monkeypatch.setattr(engine_server, "load_executor", load)
    monkeypatch.setattr(engine_server, "_configure_log", lambda level: LogWriter(-1))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(type(error)):
        config = msgspec.json.encode(runtime_config().engine).decode()
        engine_server.main(["-1", str(theirs.detach()), "-1", "1", "1.0", "", config])
