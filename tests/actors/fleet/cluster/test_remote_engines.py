"""Engines that connect over TCP, with keepers but without Ray: what they serve, and how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator

import attrs
import msgspec
import pytest
import structlog.testing
import trio

from quipu.actors.fleet.agreement import Mismatch
from quipu.actors.fleet.cluster import remote_host, remote_process
from quipu.actors.fleet.cluster.ray_messages import Ending, EngineOrder
from quipu.actors.fleet.cluster.remote_host import parse_link_address
from quipu.actors.fleet.cluster.remote_process import RemoteProcess
from quipu.actors.fleet.processes import link_port
from quipu.actors.fleet.processes.connected_host import NotStarted
from quipu.actors.fleet.processes.greeting import OtherVersion
from quipu.actors.fleet.supervisor import EngineRefusal
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.health import EngineState
from tests.links import make_link
from tests.processes import PATIENCE_S, has_ended
from tests.prompts import prompt_of
from tests.remote_engines import CutNodes, LocalNodes, open_remote_engines
from tests.runtimes import Answer, assert_nothing_routed, assert_served, eventually, value_of

NUM_TOKENS = 120


@pytest.fixture
async def tasks() -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()


@pytest.fixture
def nodes(tasks: trio.Nursery) -> Iterator[LocalNodes]:
    nodes = LocalNodes(tasks)
    yield nodes
    assert all(process.has_ended for process in nodes.processes.values())


async def test_engines_serve_and_end(nodes: LocalNodes) -> None:
    """Two engines answer over TCP with exact counts, and end with the server."""
    async with open_remote_engines(nodes) as engines:
        for seed in range(4):
            answer = await engines.client.ask(prompt_of(70, seed), max_tokens=8)
            assert_served(answer, prompt_of(70, seed), 8)
            assert answer.record.cached_tokens == 0
            again = await engines.client.ask(prompt_of(70, seed), max_tokens=8)
            assert again.record.cached_tokens == 64
        await assert_nothing_routed(engines.client)
    assert len(nodes.pids) == 2 and all(map(has_ended, nodes.pids.values()))


@pytest.mark.parametrize("how", ["killed", "lifeline"])
async def test_dead_engine_is_replaced(nodes: LocalNodes, how: str) -> None:
    """Requests of an engine that dies continue elsewhere; the death is counted once, and another process starts."""
    async with open_remote_engines(nodes) as engines:
        answers: dict[int, Answer] = {}

        async def ask(number: int) -> None:
            answers[number] = await engines.client.ask(prompt_of(70, number), max_tokens=NUM_TOKENS)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, number)
            desk = engines.client.runtime.desk
            await eventually(lambda: desk.engines()[0].num_running > 0, "requests run on the engine")
            if how == "killed":
                os.kill(nodes.pids[1], signal.SIGKILL)
            else:  # what happens if its keeper dies
                nodes.processes[1].end()
            await eventually(lambda: desk.engines()[0].deaths == 1, "its death is known")
        for number, answer in answers.items():
            assert_served(answer, prompt_of(70, number), NUM_TOKENS)
        assert 1 in {answer.record.num_engine_deaths for answer in answers.values()}
        await engines.until_ready(2)
        assert [its.deaths for its in desk.engines()] == [1, 0]
        assert len(nodes.pids) == 3 and has_ended(nodes.pids[1])
        assert value_of(engines.client.runtime.metrics.usage_disputed) == 0


async def test_partition_of_the_link(tasks: trio.Nursery) -> None:
    """While the link is cut the engine counts as dead; once it is restored, the same process comes back."""
    nodes = CutNodes(tasks)
    async with open_remote_engines(nodes, 1) as engines:
        desk, metrics = engines.client.runtime.desk, engines.client.runtime.metrics
        await engines.client.ask(prompt_of(65, 1), max_tokens=2)
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await engines.client.ask(prompt_of(70, 2), max_tokens=200))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await eventually(lambda: desk.engines()[0].num_running > 0, "a request runs")
            nodes.cable.cut()
            await eventually(lambda: engines.states == [EngineState.DEAD], "the engine counts as dead")
            await trio.sleep(0.5)
            nodes.cable.heal()
        assert_served(answers[0], prompt_of(70, 2), 200)
        assert answers[0].record.num_engine_deaths == 1
        assert len(nodes.pids) == 1 and desk.engines()[0].incarnation == 2
        warm = await engines.client.ask(prompt_of(65, 1), max_tokens=2)
        assert warm.record.cached_tokens == 64, "the engine must have kept its cache"
        assert value_of(metrics.stale_frames) > 0 and value_of(metrics.usage_disputed) == 0
    assert all(map(has_ended, nodes.pids.values()))


class FalseTickets(LocalNodes):
    """Gives the first engine a secret that is not its own."""

    def start(self, order: EngineOrder) -> RemoteProcess:
        if order.incarnation == 1:
            order = msgspec.structs.replace(order, ticket=order.ticket[:-1] + bytes([order.ticket[-1] ^ 1]))
        return super().start(order)


async def test_engine_with_a_wrong_secret(tasks: trio.Nursery) -> None:
    """An engine with a wrong secret is never connected; the other one serves; both end with the server."""
    nodes = FalseTickets(tasks)
    with structlog.testing.capture_logs() as lines:
        async with open_remote_engines(nodes, waits=False) as engines:
            await eventually(lambda: engines.states[1] is EngineState.READY, "the other engine is ready", 60)
            await eventually(lambda: any(line["event"] == "link.refused" for line in lines), "it was refused", 60)
            assert_served(await engines.client.ask(prompt_of(70, 1), max_tokens=8), prompt_of(70, 1), 8)
            assert engines.states[0] is EngineState.STARTING
    assert all(map(has_ended, nodes.pids.values())) and len(nodes.pids) == 2


async def test_other_version_is_refused(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of another version ends the start with an error that names both versions."""

    def check(greeting: bytes) -> None:
        raise OtherVersion("the engine is of quipu 9.9, this server of 1.0: restart the server")

    monkeypatch.setattr(link_port, "check_version", check)
    with trio.fail_after(60), pytest.raises(ExceptionGroup) as refused:
        async with open_remote_engines(nodes, 1, waits=False):
            await trio.sleep_forever()
    assert refused.group_contains(EngineRefusal, match=r"of quipu 9\.9, this server of 1\.0")


async def test_refusal_of_an_engine_is_told(nodes: LocalNodes) -> None:
    """The reason why an engine refuses to start reaches the operator from another machine, too."""
    with trio.fail_after(60), pytest.raises(ExceptionGroup) as refused:
        async with open_remote_engines(nodes, 1, waits=False, executor="reference", dtype="float64"):
            await trio.sleep_forever()
    assert refused.group_contains(EngineRefusal, match="float64")


async def test_different_numerics_are_refused() -> None:
    """An engine whose numerics differ from another's is refused if they must agree; the error names both."""
    same = {"max_model_len": 640, "instruction_set": "avx2"}
    ready = EngineReady(1, 101, 16, "cpu", "bfloat16", numerics="aaaa", weights="int8", **same)
    other = attrs.evolve(ready, numerics="bbbb", weights="q4_k")
    for must_agree in (True, False):
        link = make_link()
        pool = link._desk.pool  # noqa: SLF001 -- what the other engine has said is set by its own link
        pool.add().ready = ready
        link._must_agree = must_agree  # noqa: SLF001 -- made by a helper that does not pass it
        await link.deliver([ready])
        if must_agree:
            with pytest.raises(
                Mismatch, match=r"bbbb \(cpu, bfloat16, weights q4_k, .* aaaa \(cpu, bfloat16, weights int8, avx2"
            ):
                await link.deliver([other])
        else:
            await link.deliver([other])


async def test_killed_process_on_a_silent_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a process that was killed ends even if its node never answers."""
    monkeypatch.setattr(remote_process, "KILL_S", 0.1)
    calls: list[str] = []
    process = RemoteProcess(an_order(), lambda: calls.append("end"), lambda: calls.append("kill"))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.wait)
            await trio.testing.wait_all_tasks_blocked()
            process.kill()
    assert calls == ["kill"] and (await process.explain()).reason == "its node does not answer"
    process.note_ended(Ending(returncode=0))
    assert (await process.explain()).reason == "its node does not answer", "the first reason must be kept"


async def test_port_that_cannot_be_opened(nodes: LocalNodes) -> None:
    """An address on which this machine cannot listen is a final error that names the flag."""
    async with remote_host.open_cluster(nodes, "192.0.2.77:1") as cluster:
        with pytest.raises(NotStarted, match=r"--link-address: cannot listen on 192\.0\.2\.77 port 1") as refused:
            await cluster.port()
        assert refused.value.death.hopeless


async def test_wildcard_is_no_address_to_call(nodes: LocalNodes) -> None:
    """If the port listens on all addresses, engines are told an address of this node."""
    async with remote_host.open_cluster(nodes, "0.0.0.0") as cluster:
        port = await cluster.port()
        assert cluster.address == f"tcp://127.0.0.1:{port.address[1]}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("own", 0)),
        ("10.0.0.5", ("10.0.0.5", 0)),
        ("10.0.0.5:7000", ("10.0.0.5", 7000)),
        (":7000", ("own", 7000)),
        ("node.example:7000", ("node.example", 7000)),
        ("fd00::1", ("fd00::1", 0)),
        ("[fd00::1]", ("fd00::1", 0)),
        ("[fd00::1]:7000", ("fd00::1", 7000)),
    ],
)
def test_link_addresses(text: str | None, expected: tuple[str, int]) -> None:
    """Host and port are optional, and IPv6 addresses may be bracketed."""
    assert parse_link_address(text, "own") == expected


def test_secret_is_not_shown() -> None:
    """An order's representation, which may be logged, does not contain its ticket."""
    assert "ecret" not in repr(an_order())


def an_order() -> EngineOrder:
    return EngineOrder(
        engine_id=0,
        incarnation=1,
        beat_s=1.0,
        address="tcp://127.0.0.1:1",
        ticket=b"Secret",
        config="{}",
        environment={},
        max_num_seqs=1,
        module="none",
    )
