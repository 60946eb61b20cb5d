"""Turns that tenants take in rotation."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from quipu.web.http.turns import FairTurns, TooManyWaiting


async def test_turns_go_round() -> None:
    """A tenant with one task waits for one turn of a tenant with many, whose tasks are served in order of arrival."""
    turns, gate, served = FairTurns(), trio.Event(), list[str]()

    async def work(party: str, name: str) -> None:
        async with turns.turn(party):
            served.append(name)
            await gate.wait()

    async with trio.open_nursery() as nursery:
        for party, name in (*(("many", f"m{number}") for number in range(5)), ("one", "o")):
            nursery.start_soon(work, party, name)
            await wait_all_tasks_blocked()
        gate.set()
    assert served == ["m0", "o", "m1", "m2", "m3", "m4"]


async def test_one_turn_in_each_iteration_of_the_loop() -> None:
    """However many tasks take turns again and again, at most one runs between two iterations of the loop."""

    class Iterations(trio.abc.Instrument):
        num_slices = most = 0

        def after_io_wait(self, timeout: float) -> None:
            self.most = max(self.most, self.num_slices)
            self.num_slices = 0

    turns, iterations = FairTurns(), Iterations()

    async def work(party: int) -> None:
        for _ in range(20):
            async with turns.turn(party):
                iterations.num_slices += 1

    trio.lowlevel.add_instrument(iterations)
    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(work, number % 3)
    trio.lowlevel.remove_instrument(iterations)
    assert iterations.most == 1


async def test_waiting_tasks_of_a_tenant_are_bounded() -> None:
    """A tenant beyond its bound is refused, others are not; a task that stops waiting makes room and takes no turn."""
    turns, gate = FairTurns(2, max_waiting=3), trio.Event()
    num_served = 0

    async def work(party: str) -> None:
        nonlocal num_served
        async with turns.turn(party):
            num_served += 1
            await gate.wait()

    async def leave() -> None:
        with leaving:
            await work("many")

    leaving = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(work, "many")
            await wait_all_tasks_blocked()
        nursery.start_soon(leave)
        await wait_all_tasks_blocked()
        with pytest.raises(TooManyWaiting):
            await work("many")
        nursery.start_soon(work, "one")
        leaving.cancel()
        await wait_all_tasks_blocked()
        nursery.start_soon(work, "many")
        await wait_all_tasks_blocked()
        assert num_served == 2
        gate.set()
    assert num_served == 6
