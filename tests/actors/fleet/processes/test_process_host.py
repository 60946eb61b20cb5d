"""Engine processes that send invalid data, or nothing: each dies with a reason, and the next one serves.

The engine process is a `sleep`; the test sends in its place, over the real socket pair.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable

import msgspec
import pytest
import structlog.testing
import trio

from quipu import __version__
from quipu.actors.channel import Channel
from quipu.actors.engine.engine import LoopHost
from quipu.actors.fleet.frames import FrameWriter, WireMessage
from quipu.actors.fleet.processes import connected_host, heartbeat
from quipu.actors.fleet.processes.connected_host import OUT_OF_MEMORY
from quipu.actors.fleet.processes.greeting import greeting
from quipu.actors.fleet.processes.process_host import ProcessHost
from quipu.actors.fleet.processes.reconnection import Listener
from quipu.actors.fleet.supervisor import Death, EngineHost, EngineLink
from quipu.actors.messages.accountant import EngineDied, StepReport
from quipu.actors.messages.scheduler import Abort
from quipu.actors.messages.supervisor import EngineReady, Heartbeat
from quipu.actors.shared.step_record import StepRecord
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.links import make_link
from tests.processes import PATIENCE_S
from tests.prompts import prompt_of
from tests.runtimes import Client, open_with_kept_vocabulary, runtime_config, serving_info, text_of

PROMPT = prompt_of(900, seed=3)
VERSION = greeting(__version__)


def encoded(incarnation: int, *messages: WireMessage) -> bytes:
    ours, _ = trio.testing.memory_stream_one_way_pair()
    return b"".join(map(FrameWriter(ours, incarnation).encode, messages))


READY = VERSION + encoded(1, EngineReady(1, 64, 16, "fake", "none", max_model_len=1008))


class Impostor(ProcessHost):
    """A host of processes that do nothing; `act` is given their end of the socket."""

    STOP_GRACE_S = 0.05

    def __init__(self, act: Callable[[socket.socket], object], *, keeps_open: bool, beats: bool = False) -> None:
        """`keeps_open`: whether the process has the socket too, so that it stays open until the process is killed.

        `beats`: whether heartbeats are sent for it.
        """
        super().__init__(runtime_config().engine, {}, rejoin_s=0.05)
        self._act = act
        self._keeps_open = keeps_open
        self._beats = beats
        self.step_ids: list[int] = []
        """The sequences of the step that it seems to be running."""

    async def run(self, link: EngineLink) -> Death:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            death = await super().run(link)
            nursery.cancel_scope.cancel()
        return death

    async def _start(self, descriptor: int, memory: int, incarnation: int, listener: Listener) -> trio.Process:
        if self.step_ids:
            StepRecord(memory).begin(self.step_ids)
        connection = socket.socket(fileno=os.dup(descriptor))
        self._act(connection)
        if self._beats:
            self._nursery.start_soon(self._send_heartbeats, connection, incarnation)
        else:
            connection.close()
        fds = (descriptor,) if self._keeps_open else ()
        command = ["sleep", "1000"]
        return await trio.lowlevel.open_process(command, pass_fds=fds, stdin=subprocess.DEVNULL, process_group=0)

    async def _send_heartbeats(self, connection: socket.socket, incarnation: int) -> None:
        with connection:
            while self.child is None or not self.child.process.has_ended:
                connection.send(encoded(incarnation, Heartbeat(1, 0.0)), socket.MSG_NOSIGNAL)
                await trio.sleep(0.005)


class FirstImpostor:
    """Runs one impostor, then engines in this loop."""

    def __init__(self, impostor: Impostor, others: LoopHost) -> None:
        self._hosts: list[EngineHost] = [others, impostor]

    async def run(self, link: EngineLink) -> Death:
        host = self._hosts.pop() if len(self._hosts) > 1 else self._hosts[0]
        death = await host.run(link)
        await host.close()
        return death

    async def close(self) -> None:
        for host in self._hosts:
            await host.close()


def sends(data: bytes, *, keeps_open: bool = True) -> Impostor:
    return Impostor(lambda connection: connection.sendall(data), keeps_open=keeps_open)


def half_open(connection: socket.socket) -> None:
    connection.sendall(READY)
    connection.shutdown(socket.SHUT_WR)


DEATHS: dict[str, tuple[Impostor, str]] = {
    "no greeting": (sends(b"\0" * 40), "it did not say which version it is"),
    "end in the greeting": (sends(VERSION[:9], keeps_open=False), "it closed its connection and did not end"),
    "end in a frame": (sends(READY + b"\0" * 3, keeps_open=False), "it closed its connection and did not end"),
    "unknown type": (sends(READY + b"\x06\0\0\0\x01\0\0\0\x63\0"), "cannot be read: a message of type 99"),
    "invalid length": (sends(READY + b"\xff" * 16), "cannot be read: a frame of 4294967295 bytes"),
    "later incarnation": (sends(READY + encoded(7, Heartbeat(1, 0.0))), "a frame of engine 7, and this is engine 1"),
    "not from an engine": (sends(READY + encoded(1, Abort(1))), "cannot be read: Abort, which only engines receive"),
    "silence": (sends(READY), "no message for"),
    "writes no more": (Impostor(half_open, keeps_open=True), "it closed its connection and did not end"),
    "reads nothing": (
        Impostor(lambda connection: connection.sendall(READY), keeps_open=True, beats=True),
        "it has read nothing for",
    ),
}


@pytest.mark.parametrize(("impostor", "reason"), DEATHS.values(), ids=DEATHS)
async def test_impostor(monkeypatch: pytest.MonkeyPatch, impostor: Impostor, reason: str) -> None:
    """An impostor is killed with a reason, and its requests are served by the next engine."""
    monkeypatch.setattr(heartbeat, "MAX_MISSED", 0)
    monkeypatch.setattr(heartbeat, "LATE_S", 0.1)
    monkeypatch.setattr(connected_host, "TICK_S", 0.02)
    make_pair = socket.socketpair

    def with_little_room(*arguments: int) -> tuple[socket.socket, socket.socket]:
        pair = make_pair(*arguments)
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return pair

    monkeypatch.setattr(socket, "socketpair", with_little_room)
    config = runtime_config(restart_backoff_s=0.0, num_blocks=1024)
    host = FirstImpostor(impostor, LoopHost(config.engine))
    texts: list[str] = []
    with trio.fail_after(60), structlog.testing.capture_logs() as lines:
        async with open_with_kept_vocabulary(
            config, serving_info(config), lambda _: host, make_renderer=InlineRenderer
        ) as runtime:
            client = Client(runtime, config, Dials())

            async def ask() -> None:
                texts.append((await client.ask(PROMPT, max_tokens=6)).texts[0])

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(ask)
            assert runtime.desk.health().incarnation == 2
            assert runtime.entry_store.num_open_accounts == 0
    assert texts == [text_of(continuation(PROMPT, 6))] * 8
    (death,) = [line for line in lines if line["event"] == "engine.died"]
    assert reason in death["reason"]


async def run_alone(impostor: Impostor) -> tuple[Death, list[StepReport | EngineDied]]:
    """Run an impostor without a runtime; return its death and what it has reported."""
    reports: Channel[StepReport | EngineDied] = Channel(8)
    with trio.fail_after(PATIENCE_S):
        death = await impostor.run(make_link(reports))
        await impostor.close()
    return death, reports.take_nowait()


async def test_another_version() -> None:
    """An engine of another version is refused for good, with both versions, whatever it sends next."""
    death, _ = await run_alone(sends(greeting("0.2.0") + b"\xff" * 40))
    assert death == Death(
        f"the engine is of quipu 0.2.0, this server of {__version__}: restart the server", hopeless=True
    )


async def test_last_messages_count() -> None:
    """Messages that an engine sent before unreadable data are delivered."""
    columns: list[list[int]] = [[]] * 19
    sent = [msgspec.convert([number, 1, *columns, *[0] * 5], StepReport) for number in (1, 2)]
    death, reports = await run_alone(sends(READY + encoded(1, *sent) + b"\xff" * 16))
    assert "cannot be read" in death.reason
    assert reports == [msgspec.structs.replace(report, incarnation=1) for report in sent]


async def test_no_memory_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no memory for an engine's messages, that engine dies, and the server goes on."""

    async def deliver(link: EngineLink, messages: object) -> None:
        await trio.lowlevel.checkpoint()
        raise MemoryError

    monkeypatch.setattr(EngineLink, "deliver", deliver)
    death, _ = await run_alone(sends(READY))
    assert death.reason == OUT_OF_MEMORY


async def test_step_under_way() -> None:
    """A death names the sequences of the step that the process was running, if there was one."""
    impostor = sends(READY, keeps_open=False)
    assert (await run_alone(impostor))[0].step_ids is None
    impostor.step_ids = [7, 2**40, 9]
    assert (await run_alone(impostor))[0].step_ids == (7, 2**40, 9)
