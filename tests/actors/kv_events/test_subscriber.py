"""The thread that follows another server's KV events, beside an event loop."""

from __future__ import annotations

import threading
from typing import ClassVar

import msgspec
import pytest
import trio
import zmq

from quipu.actors.kv_events.follower import NEWS_BLOCKS, CacheNews
from quipu.actors.kv_events.subscriber import EventSubscriber
from tests.processes import PATIENCE_S, eventually


class Iterations(trio.abc.Instrument):
    """Counts the iterations of the loop."""

    number = 0

    def before_io_wait(self, timeout: float) -> None:
        self.number += 1


async def test_one_slice_in_an_iteration_of_the_loop() -> None:
    """A batch of many blocks is taken in slices, each in an iteration of the loop of its own."""
    context, iterations = zmq.Context(), Iterations()
    publisher = context.socket(zmq.XPUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    taken: list[tuple[int, CacheNews]] = []
    trio.lowlevel.add_instrument(iterations)
    subscriber = EventSubscriber(f"tcp://127.0.0.1:{port}", lambda news: taken.append((iterations.number, news)))
    await subscriber.start()
    try:
        count = 4 * NEWS_BLOCKS
        blocks = {"type": "BlockStored", "block_hashes": list(range(count)), "parent_block_hash": None}
        blocks |= {"token_ids": [7] * count, "block_size": 1, "lora_id": None, "medium": "GPU", "lora_name": None}
        with trio.fail_after(PATIENCE_S):
            while not publisher.poll(0):
                await trio.lowlevel.checkpoint()
            publisher.send_multipart([b"", bytes(8), msgspec.msgpack.encode([1.0, [blocks]])])
            while sum(len(news.stored) for _, news in taken) < count:
                await trio.lowlevel.checkpoint()
    finally:
        subscriber.close()
        context.destroy(linger=0)
        trio.lowlevel.remove_instrument(iterations)
    assert len(taken) >= 4 and len({number for number, _ in taken}) == len(taken)


async def test_closed_while_the_loop_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends on `close` even if the loop has not taken its last news."""

    class BusyLoop:
        calls: ClassVar[list[object]] = []

        def run_sync_soon(self, *call: object) -> None:
            self.calls.append(call)

    context = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    subscriber = EventSubscriber(f"tcp://127.0.0.1:{port}", lambda news: None)
    await subscriber.start()
    monkeypatch.setattr(subscriber, "_token", BusyLoop())
    try:
        with trio.fail_after(PATIENCE_S):
            while not publisher.poll(0):
                await trio.lowlevel.checkpoint()
            publisher.send_multipart([b"", bytes(8), b"no batch"])
            while not BusyLoop.calls:
                await trio.lowlevel.checkpoint()
    finally:
        subscriber.close()
        context.destroy(linger=0)
    eventually(lambda: "kv-follower" not in {thread.name for thread in threading.enumerate()}, "the thread ends")
