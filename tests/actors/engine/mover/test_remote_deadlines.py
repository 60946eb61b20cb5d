"""An object store that hangs in a way that the library does not notice: calls end, and leave nothing behind."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quipu.actors.engine.mover.block_header import BlockHeader
from quipu.actors.engine.mover.remote_bucket import Bucket, BucketLimits
from quipu.actors.engine.mover.remote_health import MAX_FAILURES
from quipu.actors.engine.mover.remote_keys import RemoteKeys
from quipu.actors.engine.mover.remote_object import ObjectFormat
from quipu.actors.engine.mover.remote_store import LOADING_THREADS, RemoteStore
from tests.processes import eventually

BLOCK_BYTES = 1000
NUMERICS = "numerics"
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(8)]
HEADERS = [BlockHeader(key, 16, NUMERICS, 5) for key in KEYS]
SECRET = hashlib.sha256(b"secret").digest()
PATIENCE_S = 0.3


class SlowBucket(Bucket):
    """A bucket in memory, some of whose requests hang until they are released, whatever the limits say."""

    def __init__(self, whole_s: float) -> None:
        self.limits = BucketLimits(whole_s=whole_s)
        self.objects: dict[str, bytes] = {}
        self.num_free = 1000
        """Requests that do not hang."""
        self.released = threading.Event()
        self.num_ended = 0
        self._lock = threading.Lock()

    def get(self, path: str, num_bytes: int) -> bytes | None:
        self._take_time()
        return self.objects.get(path)

    def put(self, path: str, content: bytes) -> None:
        self._take_time()
        self.objects[path] = content

    def close(self) -> None:
        """There is nothing to close."""

    def _take_time(self) -> None:
        with self._lock:
            self.num_free -= 1
            hangs = self.num_free < 0
        if hangs:
            self.released.wait(60)
        with self._lock:
            self.num_ended += 1


@pytest.fixture
def bucket() -> Iterator[SlowBucket]:
    made = SlowBucket(PATIENCE_S)
    yield made
    made.released.set()


@pytest.fixture
def store(bucket: SlowBucket) -> Iterator[RemoteStore]:
    made = RemoteStore(bucket, RemoteKeys.derive(SECRET, None), numerics=NUMERICS, block_bytes=BLOCK_BYTES)
    made.write([0] * 8, HEADERS, memoryview(blocks()))
    yield made
    bucket.released.set()
    made.close()


def blocks(value: int = 7) -> bytearray:
    return bytearray([value]) * (8 * BLOCK_BYTES)


def test_a_load_that_hangs_ends_in_time_and_touches_nothing(bucket: SlowBucket, store: RemoteStore) -> None:
    """If one of eight blocks does not come, the load is an error after the limit, and memory stays as it was."""
    memory = blocks(1)
    bucket.num_free, bucket.num_ended = 7, 0
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"[1-8] of 8 blocks after 0\.3 s"):
        store.read([0] * 8, KEYS, memoryview(memory))
    assert PATIENCE_S <= time.monotonic() - began < 10
    bucket.released.set()
    eventually(lambda: bucket.num_ended == 8, "all requests have ended")
    assert memory == blocks(1)
    bucket.num_free = 1000
    assert store.read([0] * 8, KEYS, memoryview(memory)) == HEADERS
    assert memory == blocks()


def test_a_store_that_hangs_has_its_own_copy(
    bucket: SlowBucket, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored after the time limit is what the blocks were when they were handed over: memory is only lent."""
    real_seal, sealing = ObjectFormat.seal, set[threading.Thread]()

    def seal(*arguments: Any) -> bytes:
        sealing.add(threading.current_thread())
        return real_seal(*arguments)

    monkeypatch.setattr(ObjectFormat, "seal", seal)
    bucket.objects.clear()
    bucket.num_free, bucket.num_ended = 0, 0
    memory = blocks(3)
    with pytest.raises(TimeoutError):
        store.write([0] * 8, HEADERS, memoryview(memory))
    memory[:] = blocks(9)
    bucket.released.set()
    eventually(lambda: bucket.num_ended == 8, "all requests have ended")
    bucket.num_free = 1000
    loaded = blocks(1)
    assert store.read([0] * 8, KEYS, memoryview(loaded)) == HEADERS
    assert loaded == blocks(3)
    assert sealing == {threading.current_thread()}


def test_threads_that_hang_are_bounded(bucket: SlowBucket, store: RemoteStore) -> None:
    """However often loads are tried while all requests hang, there are no more threads, and after three no waiting."""
    bucket.num_free = 0
    before = threading.active_count()
    for _ in range(MAX_FAILURES):
        with pytest.raises(TimeoutError):
            store.read([0] * 8, KEYS, memoryview(blocks()))
    began = time.monotonic()
    for _ in range(50):
        with pytest.raises(OSError, match="not asked"):
            store.read([0] * 8, KEYS, memoryview(blocks()))
    assert time.monotonic() - began < 50 * PATIENCE_S / 2
    assert threading.active_count() <= before + LOADING_THREADS
