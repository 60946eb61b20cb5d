"""The keys that grants report, one situation at a time; `test_reservation_property.py` has all of them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from quipu.actors.engine.block_manager.key_changes import NO_CHANGE, KeyChange, KeyChanges
from quipu.actors.engine.block_manager.pools import Pool
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.messages.scheduler import Granted
from tests.actors.engine.block_manager.pool_kinds import POOLS
from tests.actors.engine.block_manager.proposals import Candidate, Filled, keys_of, reserve
from tests.actors.key_reader import split

SIZE = 2


@attrs.define
class Cache:
    """A block manager driven by hand."""

    manager: BlockManager
    step: int = 0

    def grant(self, **proposal: Any) -> Granted:
        self.step += 1
        return self.manager.grant(reserve(self.step, SIZE, **proposal))

    def compute(self, sequence_id: int, tokens: list[int]) -> Granted:
        """Compute a prompt in one step and end it. Returns the grant that commits it."""
        self.grant(candidates=[Candidate(sequence_id, tokens, len(tokens))])
        return self.grant(committed=[self.step], free=[sequence_id])


@pytest.fixture(params=POOLS)
def cache(request: pytest.FixtureRequest) -> Cache:
    make_pool: Callable[[int], Pool] = request.param
    return Cache(BlockManager(6, SIZE, make_pool=make_pool))


def prefixes(tokens: list[int]) -> list[bytes]:
    return [key[:8] for key in keys_of("a", tokens, SIZE)]


def test_stored_with_the_commit(cache: Cache) -> None:
    """A prompt's blocks are reported when their step is done, in the order of the chain, and once."""
    tokens = [1, 2, 3, 4, 5]
    assert cache.grant(candidates=[Candidate(1, tokens, 5)]).stored_keys == b""
    done = cache.grant(committed=[1])
    assert split(done.stored_keys) == prefixes(tokens)
    assert (done.removed_keys, done.is_cleared) == (b"", False)
    assert cache.grant(free=[1]).stored_keys == b""
    assert cache.compute(2, tokens).stored_keys == b""


def test_filled_block(cache: Cache) -> None:
    """A block that decoding has filled is reported like the others."""
    cache.grant(candidates=[Candidate(1, [1], 1)])
    cache.grant(rows=[(1, 1, 1)])
    (key,) = keys_of("a", [1, 7], SIZE)
    assert cache.grant(filled=[Filled(1, 0, key)]).stored_keys == key[:8]


def test_removed_by_eviction(cache: Cache) -> None:
    """Evictions are in the grant that causes them."""
    cache.compute(1, [1, 2, 3, 4, 5, 6])
    evicting = cache.grant(candidates=[Candidate(2, [9] * 9, 9)])
    assert split(evicting.removed_keys) == prefixes([1, 2, 3, 4, 5, 6])[::-1]
    assert evicting.stored_keys == b""


def test_stored_and_evicted_at_once(cache: Cache) -> None:
    """A block that one grant commits and evicts is in neither column."""
    cache.grant(candidates=[Candidate(1, [1, 2, 3], 3)])
    both = cache.grant(committed=[1], free=[1], candidates=[Candidate(2, [9] * 9, 9)])
    assert (both.stored_keys, both.removed_keys) == (b"", b"")


def test_failed_step(cache: Cache) -> None:
    """Keys that a failed step published were never reported, so their withdrawal is not reported either."""
    cache.grant(candidates=[Candidate(1, [1, 2, 3], 3)])
    failed = cache.grant(failed=[1], free=[1])
    assert (failed.stored_keys, failed.removed_keys) == (b"", b"")


def test_reset(cache: Cache) -> None:
    """A reset clears everything; what is stored after it, even in the same grant, counts."""
    cache.compute(1, [1, 2, 3])
    cache.grant(candidates=[Candidate(2, [4, 5, 6], 3)])
    reset = cache.grant(reset=True, committed=[cache.step])
    assert (reset.stored_keys, reset.removed_keys, reset.is_cleared) == (b"", b"", True)
    again = cache.compute(3, [1, 2, 3])
    assert split(again.stored_keys) == prefixes([1, 2, 3])
    assert not again.is_cleared


def test_nothing_without_prefix_caching() -> None:
    """Without prefix caching nothing is reported, not even a reset."""
    cache = Cache(BlockManager(6, SIZE, enable_prefix_caching=False))
    done, reset = cache.compute(1, [1, 2, 3]), cache.grant(reset=True)
    assert (done.stored_keys, reset.is_cleared) == (b"", False)


# ---------------------------------------------------------------- orders that no grant has today


def test_removed_and_stored_again() -> None:
    """A key that is removed and stored again before the change is taken has not changed."""
    changes = KeyChanges()
    changes.on_removed([b"k" * 32, b"l" * 32])
    changes.on_stored([b"k" * 32, b"m" * 32], b"", [], 0, 0)
    assert changes.take() == KeyChange(b"m" * 8, b"l" * 8, is_cleared=False)
    assert changes.take() == NO_CHANGE


def test_cleared_last() -> None:
    """Nothing that was stored or removed before a reset is reported."""
    changes = KeyChanges()
    changes.on_removed([b"k" * 32])
    changes.on_stored([b"l" * 32], b"", [], 0, 0)
    changes.on_cleared()
    assert changes.take() == KeyChange(b"", b"", is_cleared=True)
