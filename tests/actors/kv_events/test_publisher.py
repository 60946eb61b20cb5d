"""KV events over real sockets on this machine: gaps, floods, restarts, and invalid requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from quipu.actors.config.engine_config import KvEventsConfig
from quipu.actors.engine.block_manager.key_changes import KeyChanges
from quipu.actors.engine.block_manager.misses import MissTracker
from quipu.actors.engine.engine import Engine
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.kv_events.event_log import EventLog, KvEventsError
from quipu.actors.kv_events.publisher import EventPublisher
from quipu.actors.shared.block_keys import chain_keys
from tests.kv_mirror import END, PATIENCE_S, Subscriber
from tests.processes import eventually
from tests.runtimes import runtime_config

SIZE = 4
ROOT = b"r" * 32


class Cache:
    """Events of a block manager with one chain that grows by one block per grant."""

    def __init__(self, publisher_type: type[EventPublisher] = EventPublisher, **changes: object) -> None:
        self.log = EventLog(SIZE)
        fields = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", **changes}
        self.publisher = publisher_type(KvEventsConfig(**fields), self.log)
        self.keys = [ROOT]
        self.tokens: list[int] = []

    def grow(self, count: int = 1) -> None:
        for _ in range(count):
            tokens = [len(self.tokens)] * SIZE
            (key,) = chain_keys(self.keys[-1], tokens, SIZE)
            self.log.on_stored([key], self.keys[-1], tokens, 0, len(self.keys) - 1)
            self.tokens += tokens
            self.keys.append(key)
            self.publisher.flush()

    def lose_last(self) -> None:
        self.log.on_removed([self.keys.pop()])
        del self.tokens[-SIZE:]
        self.publisher.flush()


@contextmanager
def watching(cache: Cache, topic: str = "") -> Iterator[Subscriber]:
    publisher = cache.publisher
    assert publisher.replay_endpoint is not None
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint, SIZE, topic)
    try:
        yield subscriber
    finally:
        subscriber.close()


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.publisher.close()


def assert_same(cache: Cache, subscriber: Subscriber) -> None:
    subscriber.mirror.check([ROOT])
    assert set(subscriber.mirror.blocks) == set(cache.keys[1:])
    assert subscriber.mirror.prefix_of(cache.tokens) == len(cache.tokens)


def test_late_subscriber(cache: Cache) -> None:
    """A late subscriber misses the first batches, notices this by the numbers, and gets them by a replay."""
    cache.publisher.flush()
    cache.grow(5)
    cache.lose_last()
    with watching(cache) as early:
        early.receive_while(lambda: early.next_number == 0, cache.grow)  # all of the beginning has been sent
    with watching(cache) as subscriber:
        subscriber.receive_while(lambda: subscriber.next_number == 0, cache.grow)
        assert subscriber.gaps[0][0] == 0 and subscriber.gaps[0][1] >= 7
        subscriber.receive_while(lambda: set(subscriber.mirror.blocks) != set(cache.keys[1:]))
        assert_same(cache, subscriber)
        assert subscriber.num_restarts == 0


class Stalled(EventPublisher):
    """A publisher whose thread sends nothing until it may."""

    may_send = threading.Event()
    is_stalled = threading.Event()

    def _send_unsent(self) -> None:
        if not self.may_send.is_set():
            self.is_stalled.set()
        self.may_send.wait()
        super()._send_unsent()


def test_overflow() -> None:
    """If the publisher's thread does not keep up, live batches are lost but replays are not; this is logged once, and
    nothing waits."""
    Stalled.may_send.set()
    Stalled.is_stalled.clear()
    with capture_logs() as lines:
        cache = Cache(Stalled, max_queue_size=3)
        with watching(cache) as subscriber:
            subscriber.receive_while(lambda: subscriber.next_number == 0, cache.grow)
            subscriber.receive_while(lambda: set(subscriber.mirror.blocks) != set(cache.keys[1:]))
            gaps = len(subscriber.gaps)
            Stalled.may_send.clear()
            cache.grow()
            assert Stalled.is_stalled.wait(PATIENCE_S)  # otherwise it might still send some of the next batches
            cache.grow(50)
            Stalled.may_send.set()
            subscriber.receive_while(lambda: set(subscriber.mirror.blocks) != set(cache.keys[1:]))
            assert len(subscriber.gaps) == gaps + 1
            assert_same(cache, subscriber)
        cache.publisher.close()
    assert [line["event"] for line in lines].count("kv_events.overflow") == 1


def test_kept_batches_are_bounded() -> None:
    """A replay starts with the oldest kept batch; a higher number than requested shows that some are lost."""
    cache = Cache(buffer_steps=3)
    cache.grow(10)
    with watching(cache) as subscriber:
        assert [batch.number for batch in subscriber.replay(0)] == [7, 8, 9]
        assert [batch.number for batch in subscriber.replay(9)] == [9]
        assert subscriber.replay(10) == []
    cache.publisher.close()


def test_long_replay(cache: Cache) -> None:
    """A replay arrives completely however slowly it is read: ZeroMQ drops what exceeds 1000 messages by default."""
    for _ in range(3000):
        for _ in range(120):  # 12 MB in all, more than the kernel buffers for a subscriber that does not read
            cache.log.on_removed([ROOT])
        cache.publisher.flush()
    context = zmq.Context()
    slow = context.socket(zmq.DEALER)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.setsockopt(zmq.RCVTIMEO, 20_000)
    slow.connect(cache.publisher.replay_endpoint)
    slow.send_multipart([b"", b"\0" * 8])
    slow.poll()
    with watching(cache) as subscriber:
        assert subscriber.replay(3000) == [], "the previous replay must be sent before this one is answered"
    numbers = [slow.recv_multipart()[2] for _ in range(3001)]
    assert numbers == [*(number.to_bytes(8, "big") for number in range(3000)), END]
    context.destroy(linger=0)


def test_topic() -> None:
    """Live and replayed batches carry the topic; batches of other topics are not sent."""
    cache = Cache(topic="kv@here@demo")
    with watching(cache, topic="kv@") as subscriber, watching(cache, topic="other") as stranger:
        subscriber.receive_while(lambda: subscriber.next_number == 0, cache.grow)
        assert {batch.topic for batch in subscriber.replay(0)} == {b"kv@here@demo"}
        assert not stranger.receive(0.0)
    cache.publisher.close()


def test_malformed_requests(cache: Cache) -> None:
    """Malformed requests are not answered, and do not affect valid ones."""
    cache.publisher.flush()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(cache.publisher.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"x", b"\0" * 8], [b"", b"\0" * 8, b""], [b"\0" * 8]):
        dealer.send_multipart(frames)
    dealer.send_multipart([b"", b"\0" * 8])
    assert dealer.recv_multipart()[2] == b"\0" * 8
    assert dealer.recv_multipart() == [b"", b"", END, b""]
    dealer.send_multipart([b"", b"\0" * 10_000])  # disconnected; ZeroMQ reconnects
    with watching(cache) as subscriber:
        assert len(subscriber.replay(0)) == 1
    context.destroy(linger=0)


def test_next_engine(cache: Cache) -> None:
    """The next engine can use the same address, starts at 0 with an empty cache, and a subscriber follows it."""
    with watching(cache) as subscriber:
        subscriber.receive_while(lambda: subscriber.next_number == 0, cache.grow)
        cache.grow(10)
        subscriber.receive_while(lambda: subscriber.next_number < 10)
        cache.publisher.close()
        cache.publisher.close()
        eventually(lambda: "kv-events" not in {thread.name for thread in threading.enumerate()}, "its thread ends")
        following = Cache(endpoint=cache.publisher.endpoint, replay_endpoint=cache.publisher.replay_endpoint)
        following.publisher.flush()
        subscriber.receive_while(lambda: subscriber.num_restarts == 0, following.grow)
        subscriber.receive_while(lambda: set(subscriber.mirror.blocks) != set(following.keys[1:]))
        assert subscriber.replay(0)[0].events == [{"type": "AllBlocksCleared"}]
        assert_same(following, subscriber)
        following.publisher.close()


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_taken_address(cache: Cache, field: str) -> None:
    """An address in use raises an error that names it."""
    taken = getattr(cache.publisher, field)
    with pytest.raises(KvEventsError, match=f"cannot bind {taken}: Address already in use"):
        Cache(**{field: taken})


def test_connecting(cache: Cache) -> None:
    """With `binds=False`, the publisher connects to the address of a subscriber."""
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.subscribe("")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    caller = Cache(endpoint=f"tcp://127.0.0.1:{port}", binds=False, replay_endpoint=None)
    for _ in range(400):
        caller.grow()
        if sub.poll(50):
            break
    assert len(sub.recv_multipart()) == 3
    assert caller.publisher.replay_endpoint is None
    caller.publisher.close()
    context.destroy(linger=0)


def test_rank() -> None:
    """Every batch has the engine's rank, by which a subscriber to several engines distinguishes them."""
    cache = Cache(rank=3)
    cache.grow()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.rcvtimeo = round(PATIENCE_S * 1000)
        dealer.connect(cache.publisher.replay_endpoint)
        dealer.send_multipart([b"", bytes(8)])
        payload = dealer.recv_multipart()[3]
    cache.publisher.close()
    assert msgspec.msgpack.decode(payload)[2] == 3


def test_off_by_default() -> None:
    """Unless configured, an engine observes nothing, opens nothing and starts nothing."""
    config = runtime_config().engine
    assert config.kv_events is None
    executor = load_executor(config)
    before = set(threading.enumerate())
    engine = Engine(config, executor)
    assert engine.events is None
    kinds = [type(observer) for observer in engine.block_manager.pool.observers]
    assert kinds == [KeyChanges, MissTracker], "only the engine's own observers follow the pool"
    assert set(threading.enumerate()) <= before
    executor.backend.close()
