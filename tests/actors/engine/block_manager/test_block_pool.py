"""The block pool alone: who holds blocks, which is reused next, and which block a key leads to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quipu.actors.engine.block_manager.eviction_queue import MAX_QUEUE_ENTRIES
from quipu.actors.engine.block_manager.pool_state import COMMITTED
from quipu.actors.engine.block_manager.pools import Pool
from quipu.actors.shared.block_keys import KEY_BYTES
from tests.actors.engine.block_manager.block_checks import cached_blocks, check_pool, is_free, pending_step
from tests.actors.engine.block_manager.pool_kinds import POOLS

Make = Callable[[int], Pool]


@pytest.fixture(params=POOLS)
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a pool: in turn the one in Python and the one in C."""
    make_pool: Make = request.param
    return make_pool


def k(name: str) -> bytes:
    """Return a key."""
    return name.encode().ljust(KEY_BYTES)


def pool_with_cached(make: Make, num_blocks: int, *keys: bytes) -> Pool:
    """Make a pool in which one sequence has written `keys`, in order, and released its blocks."""
    pool = make(num_blocks)
    table = pool.take(len(keys))
    for block, key in zip(table, keys, strict=True):
        assert pool.publish([block], [key], COMMITTED)
    pool.release(table)
    return pool


def test_null_block_is_never_granted(make: Make) -> None:
    """A pool of n blocks grants n-1 of them, and never block 0."""
    pool = make(5)
    assert pool.num_free == 4
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert not is_free(pool, 0)


def test_pool_needs_two_blocks(make: Make) -> None:
    """With only the null block, nothing can be held."""
    with pytest.raises(ValueError, match="num_blocks=1"):
        make(1)


def test_refused_take_changes_nothing(make: Make) -> None:
    """A `take` of more blocks than are free raises and leaves the pool unchanged."""
    pool = pool_with_cached(make, 4, k("k"))
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        pool.take(4)
    assert (pool.num_free, pool.num_cached) == (3, 1)


def test_blank_blocks_are_taken_first(make: Make) -> None:
    """No cached block is evicted while a blank block is free."""
    pool = pool_with_cached(make, 5, k("a"), k("b"))
    assert not {1, 2} & set(pool.take(2))
    assert pool.num_evicted == 0
    assert pool.match([k("a"), k("b")], 2) == [1, 2]


def test_last_freed_blank_block_is_taken_first(make: Make) -> None:
    """Of the blank blocks, the most recently freed one is reused first."""
    pool = make(5)
    table = pool.take(3)
    pool.release([table[0]])
    pool.release([table[2]])
    assert pool.take(2) == [table[2], table[0]]


def test_chain_is_evicted_tail_first(make: Make) -> None:
    """A root is useful without its tail, but a tail is not without its root."""
    pool = pool_with_cached(make, 4, k("1"), k("12"), k("123"))
    pool.take(1)
    assert pool.match([k("1"), k("12"), k("123")], 3) == [1, 2]
    pool.take(1)
    assert pool.match([k("1"), k("12"), k("123")], 3) == [1]
    assert pool.num_evicted == 2


def test_least_recently_released_is_evicted_first(make: Make) -> None:
    """Holding a cached block again makes it the most recent."""
    pool = pool_with_cached(make, 4, k("old"))
    others = pool.take(2)
    for block, key in zip(others, [k("mid"), k("new")], strict=True):
        pool.publish([block], [key], COMMITTED)
        pool.release([block])
    again = pool.match([k("old")], 1)
    pool.share(again)
    pool.release(again)
    pool.take(1)
    assert pool.match([k("mid")], 1) == []
    assert pool.match([k("old")], 1) == again


def test_shared_block_is_freed_by_last_holder(make: Make) -> None:
    """A shared block is freed only when its last holder releases it."""
    pool = pool_with_cached(make, 3, k("k"))
    (block,) = pool.match([k("k")], 1)
    assert pool.num_free == 2
    pool.share([block])
    assert pool.num_free == 1
    pool.share([block])
    assert pool.num_free == 1, "the block must already be held"
    pool.release([block])
    assert not is_free(pool, block)
    pool.release([block])
    assert is_free(pool, block)


def test_unshare_restores_eviction_order(make: Make) -> None:
    """The blocks are evicted in the same order as if they had never been held."""
    pool = pool_with_cached(make, 4, k("1"), k("12"), k("123"))
    pool.share([1, 2])
    pool.unshare([1, 2])
    assert (pool.num_free, pool.num_cached) == (3, 3)
    check_pool(pool, [])
    assert cached_blocks(pool) == [3, 2, 1]
    assert pool.take(2) == [3, 2]


def test_eviction_skips_held_blocks(make: Make) -> None:
    """A cached block that is held is not evicted; once freed again, it is the most recent."""
    pool = pool_with_cached(make, 4, k("1"), k("12"), k("123"))
    pool.share([3])
    assert cached_blocks(pool) == [2, 1]
    assert pool.take(1) == [2]
    pool.release([3])
    assert cached_blocks(pool) == [1, 3]
    check_pool(pool, [[2]])


def test_eviction_queue_is_bounded(make: Make) -> None:
    """However often blocks are hit and freed, the queue stays short; order and count are as if each had one entry."""
    pool = pool_with_cached(make, 5, k("1"), k("12"), k("123"))
    for _ in range(100):
        pool.share([1, 2])
        pool.release([1, 2])
    assert len(pool.state().queue) <= MAX_QUEUE_ENTRIES * pool.num_blocks + 2
    assert cached_blocks(pool) == [3, 2, 1]
    check_pool(pool, [])
    assert pool.take(3) == [4, 3, 2]


def test_run_is_published_as_far_as_it_is_new(make: Make) -> None:
    """Keys that lead to other blocks are left out, and so are their blocks when the run is committed."""
    pool = pool_with_cached(make, 6, k("12"))
    table = pool.take(4)
    assert not pool.publish(table, [k("1"), k("12"), k("123"), k("1234")], 7)
    assert pending_step(pool, table[0]) == 7
    assert pending_step(pool, table[1]) == COMMITTED
    assert pool.commit(table, 7) == [range(1), range(2, 4)]
    assert pool.state().committed_keys() == {k("1"), k("12"), k("123"), k("1234")}
    check_pool(pool, [table])


def test_match_is_a_prefix_within_the_limit(make: Make) -> None:
    """A match ends at the first unknown key, and at the limit."""
    pool = pool_with_cached(make, 5, k("1"), k("12"), k("123"))
    assert pool.match([k("1"), k("12"), k("123"), k("1234")], 4) == [1, 2, 3]
    assert pool.match([k("1"), k("12"), k("123")], 2) == [1, 2]
    assert pool.match([k("1"), k("x"), k("123")], 3) == [1]
    assert pool.match([k("12")], 0) == []


def test_first_publisher_keeps_the_key(make: Make) -> None:
    """A second block with the same contents stays private, and becomes blank when released."""
    pool = make(4)
    first, second = pool.take(2)
    assert pool.publish([first], [k("k")], 1)
    assert not pool.publish([second], [k("k")], 1)
    assert pool.commit([second], 1) == []
    assert pool.commit([first], 1) == [range(1)]
    pool.release([second])
    assert pool.num_cached == 0
    assert pool.match([k("k")], 1) == [first]


def test_key_is_committed_once(make: Make) -> None:
    """Only the step that wrote a key can commit it."""
    pool = make(3)
    (block,) = pool.take(1)
    pool.publish([block], [k("k")], 7)
    assert pool.commit([block], 6) == []
    assert pool.commit([block], 7) == [range(1)]
    assert pool.commit([block], 7) == []


def test_unpublished_key_is_not_found(make: Make) -> None:
    """A withdrawn key is not found, whether its block is held or free; a free block becomes blank."""
    pool = make(4)
    held, released = pool.take(2)
    pool.publish([held], [k("h")], 3)
    pool.publish([released], [k("r")], 3)
    pool.release([released])
    assert pool.num_cached == 1
    pool.unpublish(released, 3)
    pool.unpublish(held, 3)
    assert pool.match([k("h")], 1) == pool.match([k("r")], 1) == []
    assert (pool.num_cached, pool.num_free) == (0, 2)
    check_pool(pool, [[held]])


def test_unpublish_spares_other_steps(make: Make) -> None:
    """Neither a committed key nor one that another step has since published on the same block is removed."""
    pool = make(2)
    (block,) = pool.take(1)
    pool.publish([block], [k("k")], 3)
    pool.commit([block], 3)
    pool.unpublish(block, 3)
    assert pool.match([k("k")], 1) == [block]
    pool.release([block])
    assert pool.take(1) == [block]  # evicts the cached block
    pool.publish([block], [k("k")], 5)
    pool.unpublish(block, 4)
    assert pool.match([k("k")], 1) == [block]
    assert pool.commit([block], 3) == []


def test_check_detects_double_use(make: Make) -> None:
    """`check` fails for an unknown table, and for one that contains a block twice."""
    pool = make(4)
    table = pool.take(2)
    check_pool(pool, [table])
    with pytest.raises(AssertionError, match="differ"):
        check_pool(pool, [table, [table[0]]])
    with pytest.raises(AssertionError, match="twice"):
        check_pool(pool, [[table[0], table[0]]])
    with pytest.raises(AssertionError, match="differ"):
        check_pool(pool, [])
