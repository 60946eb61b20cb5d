"""Which blocks an object store is believed to hold."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.mover import remote_index
from quipu.actors.engine.mover.remote_index import REFRESH_RATIO, REFRESH_S, RemoteIndex
from quipu.actors.engine.mover.remote_keys import RemoteKeys
from quipu.actors.engine.mover.remote_names import BlockNames
from quipu.actors.messages.mover import ListedPage

NAMES = BlockNames(RemoteKeys.derive(hashlib.sha256(b"secret").digest(), None), "numerics")
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(20)]
LISTED = [NAMES.name_of(key) for key in KEYS]


def index_of(names: list[bytes], now: float = 0.0) -> RemoteIndex:
    """Return an index after a complete listing."""
    index = RemoteIndex(NAMES)
    index.begin_listing(now)
    index.add_page(ListedPage(names, is_last=True), now)
    return index


def held(index: RemoteIndex) -> set[int]:
    return {number for number, key in enumerate(KEYS) if index.holds(key)}


def test_pages_are_found_at_once() -> None:
    """What a page lists can be found before the listing is over."""
    index = RemoteIndex(NAMES)
    index.begin_listing(0)
    index.add_page(ListedPage(LISTED[:5], is_last=False), 1)
    assert held(index) == set(range(5))
    assert index.num_held(KEYS) == 5


def test_a_complete_listing_removes_what_it_did_not_find() -> None:
    """Objects that others have deleted are gone after the next listing, those it found are there."""
    index = index_of(LISTED[:5])
    index.begin_listing(1000)
    index.add_page(ListedPage(LISTED[3:4], is_last=False), 1001)
    assert held(index) == {0, 1, 2, 3, 4}
    index.add_page(ListedPage(LISTED[8:9], is_last=True), 1002)
    assert held(index) == {3, 8}


def test_what_is_stored_during_a_listing_stays() -> None:
    """A block that was stored or missed since a listing began is as it was, whatever the listing says."""
    index = index_of(LISTED[:3])
    index.begin_listing(1000)
    index.stored(KEYS[10:12])
    index.missed(KEYS[:1])
    index.add_page(ListedPage(LISTED[:3], is_last=False), 1001)
    assert held(index) == {1, 2, 10, 11}
    index.missed(KEYS[11:12])
    index.stored(KEYS[:1])
    index.add_page(ListedPage([], is_last=True), 1002)
    assert held(index) == {0, 1, 2, 10}


def test_a_listing_that_is_given_up_removes_nothing() -> None:
    """What was known stays, and what the listing has found until then."""
    index = index_of(LISTED[:3])
    index.begin_listing(1000)
    index.add_page(ListedPage(LISTED[5:6], is_last=False), 1001)
    index.give_up_listing(1002)
    assert held(index) == {0, 1, 2, 5}
    index.add_page(ListedPage([], is_last=True), 1003)
    assert held(index) == {0, 1, 2, 5}


def test_too_many_changes_during_a_listing_keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """If more was stored than can be noted, the end of a listing removes nothing that was stored meanwhile."""
    monkeypatch.setattr(remote_index, "MAX_CHANGED", 2)
    index = RemoteIndex(NAMES)
    index.begin_listing(0)
    index.stored(KEYS[:5])
    index.add_page(ListedPage(LISTED[9:10], is_last=True), 1)
    assert held(index) == {0, 1, 2, 3, 4, 9}


def test_held_blocks_are_counted_up_to_the_first_gap() -> None:
    """Only leading blocks are worth loading, and no key after the first gap is looked at."""
    index = index_of([LISTED[0], LISTED[1], LISTED[3]])
    keys = iter(KEYS)
    assert index.num_held(keys) == 2
    assert next(keys) == KEYS[3]


@pytest.mark.parametrize(("duration", "pause"), [(0.5, REFRESH_S), (59, REFRESH_S), (600, 600 * REFRESH_RATIO)])
def test_listings_take_a_tenth_of_the_time_at_most(duration: float, pause: float) -> None:
    """The next listing begins after the refresh interval, or later if the last one took long, also if it failed."""
    for ends in (True, False):
        index = RemoteIndex(NAMES)
        assert index.next_listing_at == 0
        index.begin_listing(100)
        assert index.next_listing_at is None
        if ends:
            index.add_page(ListedPage([], is_last=True), 100 + duration)
        else:
            index.give_up_listing(100 + duration)
        assert index.next_listing_at == 100 + duration + pause


def test_memory_is_bounded_by_the_names() -> None:
    """An index keeps at most its maximum of names, however many a listing has."""
    index = RemoteIndex(NAMES, max_names=100)
    index.begin_listing(0)
    names = (hashlib.sha256(number.to_bytes(4)).digest()[:16] for number in itertools.count())
    for _ in range(10):
        index.add_page(ListedPage(list(itertools.islice(names, 256)), is_last=False), 1)
    index.add_page(ListedPage([], is_last=True), 1)
    assert len(index) == 100


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "miss", "other", "delete", "begin", "page", "end", "give up"]), st.integers(0, 7)
    ),
    max_size=60,
)


@given(STEPS)
def test_a_complete_listing_is_right_about_what_did_not_change(steps: list[tuple[str, int]]) -> None:
    """After each complete listing, the index is right about every block that was there, or was not, all the while.

    A listing looks at one block after the other. Meanwhile this server stores, and others store and delete.
    """
    index = RemoteIndex(NAMES)
    there: set[int] = set()
    since_begin: list[set[int]] | None = None
    stored: set[int] = set()
    missed: set[int] = set()
    looked_at = 0
    for step, number in steps:
        if step == "store":
            index.stored([KEYS[number]])
            there.add(number)
            stored.add(number)
            missed.discard(number)
        elif step == "miss" and number not in there:
            index.missed([KEYS[number]])
            missed.add(number)
            stored.discard(number)
        elif step == "other":
            there.add(number)
        elif step == "delete":
            there.discard(number)
        elif step == "begin":
            index.begin_listing(0)
            since_begin, looked_at = [], 0
            stored.clear()
            missed.clear()
        elif step == "give up":
            index.give_up_listing(0)
            since_begin = None
        elif step in ("page", "end") and since_begin is not None:
            end = 8 if step == "end" else min(8, looked_at + number)
            names = [LISTED[at] for at in range(looked_at, end) if at in there]
            index.add_page(ListedPage(names, is_last=step == "end"), 1)
            looked_at = end
        if since_begin is not None:
            since_begin.append(set(there))
        if step == "end" and since_begin is not None:
            always, ever = set.intersection(*since_begin), set.union(*since_begin)
            assert (always | stored) - missed <= held(index)
            assert held(index) <= ever | stored
            assert not held(index) & missed
            since_begin = None
