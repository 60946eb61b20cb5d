"""Channels in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from quipu.actors.channel import Channel


async def test_send_and_post_share_one_order() -> None:
    """Items are received in the order in which they were added."""
    channel: Channel[int] = Channel(10)
    await channel.send(1)
    channel.post(2)
    await channel.send(3)
    channel.post(4)
    assert await channel.receive_all() == [1, 2, 3, 4]


async def test_send_waits_post_does_not() -> None:
    """A full channel makes senders wait, in order, and still accepts posted items."""
    channel: Channel[int] = Channel(1)
    await channel.send(0)
    async with trio.open_nursery() as nursery:
        for item in (1, 2):
            nursery.start_soon(channel.send, item)
            await trio.testing.wait_all_tasks_blocked()
        channel.post(9)
        assert len(channel) == 2
        assert await channel.receive_all() == [0, 9]
        await trio.testing.wait_all_tasks_blocked()
        assert await channel.receive_all() == [1]
        await trio.testing.wait_all_tasks_blocked()
        assert await channel.receive_all() == [2]


async def test_cancelled_sender_costs_no_slot() -> None:
    """A sender that is cancelled leaves the capacity as it was."""
    channel: Channel[int] = Channel(1)
    await channel.send(0)
    with trio.move_on_after(0):
        await channel.send(1)
    assert channel.take_nowait() == [0]
    await channel.send(2)
    with trio.move_on_after(0) as scope:
        await channel.send(3)
    assert scope.cancelled_caught
    assert channel.take_nowait() == [2]
    await channel.send(4)
    assert await channel.receive_all() == [4]


async def test_receiver_gets_all_items_at_once() -> None:
    """Everything that is there when the receiver runs is received at once."""
    channel: Channel[int] = Channel(10)
    received: list[list[int]] = []

    async def receive() -> None:
        received.append(await channel.receive_all())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        for item in range(5):
            channel.post(item)
    assert received == [[0, 1, 2, 3, 4]]


async def test_second_receiver_raises() -> None:
    """A second receiver is an error instead of a race."""
    channel: Channel[int] = Channel(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.receive_all)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await channel.receive_all()
        nursery.cancel_scope.cancel()


async def handed_over(channel: Channel[int], take_now: Callable[[int], bool], items: list[int]) -> list[object]:
    """Hand items over to a receiver that waits; return what it then received, or its error."""
    received: list[object] = []

    async def receive() -> None:
        try:
            received.append(await channel.receive_all(take_now))
        except ValueError as error:
            received.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        received += [channel.deliver_now(item) for item in items]
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return received


async def test_deliver_now() -> None:
    """A waiting receiver handles items in the sender's task and goes on waiting; otherwise nothing is delivered."""
    channel: Channel[int] = Channel(1)
    taken: list[int] = []

    def take_now(item: int) -> bool:
        taken.append(item)
        return True

    assert not channel.deliver_now(0), "nobody waits"
    assert await handed_over(channel, take_now, [1, 2]) == [True, True]
    assert taken == [1, 2] and not channel.deliver_now(3), "the receiver was cancelled"
    channel.post(4)
    assert await handed_over(channel, take_now, [5]) == [[4], False], "it is not waiting"
    assert taken == [1, 2]


async def test_deliver_now_is_left_to_the_receiver() -> None:
    """A receiver that has not finished an item is woken, and gets no other item meanwhile."""
    channel: Channel[int] = Channel(1)
    assert await handed_over(channel, lambda item: False, [1, 2]) == [True, False, []]


async def test_deliver_now_fails() -> None:
    """An error is raised in the receiver's task, and the sender goes on."""

    def take_now(item: int) -> bool:
        raise ValueError(f"no {item}")

    channel: Channel[int] = Channel(1)
    assert await handed_over(channel, take_now, [1, 2]) == [True, False, "no 1"]


async def test_post_during_deliver_now() -> None:
    """An item that is posted while another is handled wakes the receiver afterwards."""
    channel: Channel[int] = Channel(1)

    def take_now(item: int) -> bool:
        channel.post(item + 1)
        assert not channel.deliver_now(item + 2)
        return True

    assert await handed_over(channel, take_now, [1]) == [True, [2]]
