"""The pool in C behaves like the pool in Python: same results, same state, same calls of observers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quipu.actors.engine.block_manager.block_pool import BlockPool
from quipu.actors.engine.block_manager.pool_state import COMMITTED
from quipu.actors.engine.block_manager.pools import Pool, make_pool
from quipu.actors.messages.tiers import Tier
from quipu.actors.shared.block_keys import KEY_BYTES
from quipu.actors.shared.native import IS_COMPILED
from tests.actors.engine.block_manager.block_checks import cached_blocks, check_pool

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="installed without a C compiler: there is no pool in C")

# few keys, so that they collide often; some differ only at the end, some only at the beginning
KEYS = [bytes([i % 3, *bytes(KEY_BYTES - 2), i // 3]) for i in range(9)]


class Listener:
    """Records the calls of a pool's observer."""

    def __init__(self) -> None:
        self.notified: list[object] = []

    def on_stored(
        self,
        keys: Sequence[bytes],
        parent_key: bytes,
        token_ids: list[int],
        start: int,
        block_index: int,
        sequence_id: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        raise AssertionError("a pool reports removals only")

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        self.notified.append(list(keys))

    def on_cleared(self) -> None:
        self.notified.append("cleared")


class Twins(RuleBasedStateMachine):
    """Makes the same calls to both pools."""

    @initialize(num_blocks=st.integers(2, 14), is_watched=st.booleans())
    def begin(self, num_blocks: int, is_watched: bool) -> None:
        self.twins: list[Pool] = [BlockPool(num_blocks), make_pool(num_blocks)]
        self.listeners = [Listener(), Listener()]
        if is_watched:
            for twin, listener in zip(self.twins, self.listeners, strict=True):
                twin.observers.append(listener)
        self.tables: list[list[int]] = []
        self.pins: list[list[int]] = []
        self.step = 0

    def call_both(self, call: Callable[[Pool], object]) -> object:
        answers = [call(twin) for twin in self.twins]
        assert answers[0] == answers[1]
        return answers[0]

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if count > self.twins[0].num_free:
            for twin in self.twins:
                with pytest.raises(ValueError, match=f"{count} blocks asked for, {twin.num_free} are free"):
                    twin.take(count)
        else:
            table = self.call_both(lambda pool: pool.take(count))
            assert isinstance(table, list)
            self.tables.append(table)

    @rule(data=st.data(), limit=st.integers(0, 5), is_kept=st.booleans())
    def share(self, data: st.DataObject, limit: int, is_kept: bool) -> None:
        known = [key for key in self.twins[0].state().keys if key is not None]
        keys = data.draw(st.permutations(known or KEYS))
        blocks = self.call_both(lambda pool: pool.match(keys, limit))
        assert isinstance(blocks, list)
        self.call_both(lambda pool: pool.share(blocks))
        if is_kept:
            self.tables.append(blocks)
        else:
            self.call_both(lambda pool: pool.unshare(blocks))

    @rule(count=st.integers(1, 4), at=st.integers(0, len(KEYS)))
    def take_publish_release(self, count: int, at: int) -> None:
        """Take, publish and release blocks, so that there are free blocks that can be found."""
        if count <= self.twins[0].num_free:
            table = self.call_both(lambda pool: pool.take(count))
            self.call_both(lambda pool: pool.publish(table, [*KEYS, *KEYS][at : at + count], COMMITTED))
            self.call_both(lambda pool: pool.release(table))

    @rule(count=st.integers(0, 6))
    def next_evicted(self, count: int) -> None:
        """Those found are evicted first and in this order, and looking at them does not change it."""
        found = self.call_both(lambda pool: list(pool.next_evicted(count).items()))
        twin = self.twins[0]
        state = twin.state()
        first = [block for block in cached_blocks(twin)[:count] if block not in state.pending]
        assert found == [(state.keys[block], block) for block in first]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), is_committed=st.booleans())
    def publish(self, data: st.DataObject, is_committed: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        keys = data.draw(st.permutations(KEYS))[: len(table)]
        self.step += 1
        step = COMMITTED if is_committed else self.step
        self.call_both(lambda pool: pool.publish(table, keys, step))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        step = data.draw(st.integers(1, self.step + 1))
        self.call_both(lambda pool: pool.commit(table, step))

    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        pending = self.twins[0].state().pending
        block = data.draw(st.sampled_from(sorted(pending) or [1]))
        if block in {block for pin in self.pins for block in pin}:
            return  # a pinned block has been written
        step = data.draw(st.sampled_from([pending.get(block, 1), self.step + 1]))
        self.call_both(lambda pool: pool.unpublish(block, step))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.call_both(lambda pool: pool.release(table))

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        known = [key for key in self.twins[0].state().keys if key is not None]
        keys = data.draw(st.permutations(known or KEYS))[:3]
        blocks = self.call_both(lambda pool: pool.match(keys, len(keys)))
        assert isinstance(blocks, list)
        if blocks and self.call_both(lambda pool: pool.is_written(blocks)):
            self.call_both(lambda pool: pool.pin(blocks))
            self.pins.append(blocks)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        blocks = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.call_both(lambda pool: pool.is_freed_by(blocks))
        self.call_both(lambda pool: pool.unpin(blocks))

    @precondition(lambda self: not self.pins and self.twins[0].num_evicted)
    @rule()
    def reset(self) -> None:
        self.call_both(lambda pool: pool.reset())

    @precondition(lambda self: hasattr(self, "twins"))
    @invariant()
    def pools_are_equal(self) -> None:
        self.call_both(lambda pool: pool.state())
        self.call_both(lambda pool: (pool.num_free, pool.num_cached, pool.num_pinned, pool.num_pinned_only))
        self.call_both(lambda pool: (pool.num_evicted, pool.num_blocks))
        self.call_both(lambda pool: [pool.holds(key) for key in KEYS])
        assert self.listeners[0].notified == self.listeners[1].notified
        for twin in self.twins:
            check_pool(twin, self.tables, self.pins)


TestTwins = Twins.TestCase


def test_index_survives_many_evictions() -> None:
    """The index stays correct over thousands of removals."""
    twins = [BlockPool(400), make_pool(400)]
    for number in range(3000):
        keys = [(number * 7 % 911 + i).to_bytes(KEY_BYTES, "little") for i in range(number % 13)]
        found = [pool.match(keys, len(keys)) for pool in twins]
        assert found[0] == found[1]
        for pool in twins:
            pool.share(found[0])
            table = found[0] + pool.take(len(keys) - len(found[0]))
            pool.publish(table, keys, COMMITTED)
            pool.release(table)
    assert twins[0].state() == twins[1].state()
    assert twins[0].num_evicted > 1000


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda pool: pool.match([b"short"], 1), ValueError, "32 bytes"),
        (lambda pool: pool.match(["no bytes"], 1), TypeError, "bytes"),
        (lambda pool: pool.holds(b""), ValueError, "32 bytes"),
        (lambda pool: pool.release([4]), IndexError, "no block 4"),
        (lambda pool: pool.release([0]), IndexError, "no block 0"),
        (lambda pool: pool.share([-1]), IndexError, "no block -1"),
        (lambda pool: pool.share(["1"]), TypeError, "int"),
        (lambda pool: pool.share([1] * 9), ValueError, "more blocks"),
        (lambda pool: pool.take(-1), ValueError, "-1 blocks"),
        (lambda pool: pool.next_evicted(-1), ValueError, "-1 blocks"),
        (lambda pool: pool.publish([1], [], 1), ValueError, "1 blocks and 0 keys"),
        (lambda pool: pool.publish([1], [b"x"], 1), ValueError, "32 bytes"),
        (lambda pool: pool.unpublish(9, 1), IndexError, "no block 9"),
        (lambda pool: pool.commit([1]), TypeError, "2 arguments"),
        (lambda pool: setattr(pool, "observers", 1), TypeError, "list"),
    ],
)
def test_invalid_arguments_change_nothing(call: Callable[[Pool], object], error: type[Exception], words: str) -> None:
    """A bug in a caller must raise an exception, and never overwrite memory."""
    pool = make_pool(4)
    before = pool.state()
    with pytest.raises(error, match=words):
        call(pool)
    assert pool.state() == before


def test_exception_of_observer_is_raised() -> None:
    """An observer's exception reaches the caller, and the evicted blocks are in a consistent state."""

    class Broken(Listener):
        def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
            raise RuntimeError("broken")

    pool = make_pool(3)
    table = pool.take(2)
    pool.publish(table, KEYS[:2], COMMITTED)
    pool.release(table)
    pool.observers.append(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        pool.take(1)
    assert pool.match(KEYS[:2], 2) == table[:1]


def test_reference_cycle_with_observers_is_collected() -> None:
    """A pool and its observers refer to each other, and the garbage collector frees both."""

    class ReferringObserver(Listener):
        pool: Pool | None = None

    pool, observer = make_pool(3), ReferringObserver()
    observer.pool = pool
    pool.observers.append(observer)
    gone = weakref.ref(observer)
    del pool, observer
    gc.collect()
    assert gone() is None
