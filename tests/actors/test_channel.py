"""Channels in memory."""

from __future__ import annotations

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
    """A sender that is cancelled, or gives its reservation back, leaves the capacity as it was."""
    channel: Channel[int] = Channel(1)
    await channel.reserve()
    with trio.move_on_after(0):
        await channel.send(1)
    channel.cancel_reservation()
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
