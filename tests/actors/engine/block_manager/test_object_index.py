"""Blocks of the object store: what an engine tells others of it, and what it believes of what others tell."""

from __future__ import annotations

import hashlib

import pytest

from quipu.actors.engine.block_manager import object_index
from quipu.actors.engine.block_manager.object_index import NO_NEWS, ObjectIndex
from quipu.actors.engine.mover.remote_index import REFRESH_S, RemoteIndex
from quipu.actors.engine.mover.remote_keys import RemoteKeys
from quipu.actors.engine.mover.remote_names import BlockNames
from quipu.actors.messages.block_manager import LookUp
from quipu.actors.messages.mover import ListedPage, MoveFailed
from quipu.actors.messages.tiers import LoadFailure, Tier
from quipu.actors.shared.block_keys import key_prefixes
from tests.actors.engine.block_manager.managed_tiers import KEYS, OTHER, PROMPT, SIZE, Managed, managed
from tests.actors.engine.block_manager.proposals import Candidate, root_of

NAMES = BlockNames(RemoteKeys.derive(hashlib.sha256(b"secret").digest(), None), "numerics")


def with_bucket() -> tuple[Managed, ObjectIndex]:
    """Return a block manager that knows nothing of a bucket, whose first listing has found nothing."""
    objects = ObjectIndex(RemoteIndex(NAMES))
    engine = managed(objects=objects)
    engine.grant()
    objects.on_listed(ListedPage([], is_last=True), 0.0)
    return engine, objects


def test_hinted_blocks_are_loaded() -> None:
    """What another engine has stored is loaded as soon as the router says so, and counts as remote once it has come."""
    engine, _ = with_bucket()
    assert engine.grant(Candidate(1, PROMPT, 13), shared=KEYS).loading_ids == [1]
    (move,) = engine.moves()
    assert (move.source, move.keys) == (Tier.REMOTE, KEYS)
    assert engine.end(move) == (1,)
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert granted.admitted_tier_spans == [{"remote": [0, 3 * SIZE]}]
    assert granted.shared_keys == granted.unshared_keys == b"", "whoever gave the hint knows"


def test_hint_is_no_count() -> None:
    """A hint changes nothing of what the tier reports, and only what a load brings counts."""
    engine, _ = with_bucket()
    granted = engine.grant(shared=KEYS)
    assert [report.num_used for report in granted.tiers] == []
    assert engine.moves() == []


def test_wrong_hint_is_asked_for_once() -> None:
    """What was hinted at and is missing is computed and counted so, told to others, and not asked for again before the
    next listing, however often it is hinted at."""
    engine, objects = with_bucket()
    engine.grant(Candidate(1, PROMPT, 13), shared=KEYS)
    (move,) = engine.moves()
    engine.end(move, MoveFailed(move.number, moved=[0], wrong={1: LoadFailure.MISSING, 2: LoadFailure.MISSING}))
    granted = engine.grant(Candidate(1, PROMPT, 13), shared=KEYS)
    assert granted.admitted_reused == [SIZE]
    assert granted.unshared_keys == key_prefixes(KEYS[1:])
    assert [report.failed_loads for report in granted.tiers] == [{"missing": 2}]
    engine.manager.pool.reset()
    assert engine.grant(Candidate(2, PROMPT, 13), shared=KEYS).loading_ids == [2]
    (again,) = engine.moves()
    assert again.keys == KEYS[:1]
    engine.end(again)
    engine.grant(Candidate(2, PROMPT, 13), shared=KEYS)
    engine.manager.pool.reset()
    engine.now = REFRESH_S
    assert objects.known.next_listing_at == REFRESH_S
    engine.grant(Candidate(3, PROMPT, 13), shared=KEYS)
    (later,) = engine.moves()
    assert later.keys == KEYS


def test_wrong_hint_about_what_is_stored_here() -> None:
    """What was missing and was then stored by this engine is found."""
    _, objects = with_bucket()
    objects.drop(KEYS[0], 0)
    objects.learn(KEYS[:1])
    assert not objects.holds(KEYS[0])
    objects.put(KEYS[0], 0)
    assert objects.holds(KEYS[0])


def test_many_wrong_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hints are nearly always wrong, none is believed until the next listing begins."""
    monkeypatch.setattr(object_index, "MAX_MISSED", 2)
    _, objects = with_bucket()
    for key in KEYS:
        objects.drop(key, 0)
    other = hashlib.sha256(b"other").digest()
    objects.learn([other])
    assert not objects.holds(other)
    assert objects.is_listing_due(REFRESH_S)
    objects.learn([other])
    assert objects.holds(other)


def test_stores_are_told_once() -> None:
    """What is stored is told with the next grant, asked for once; so is what a listing has, once found."""
    engine, objects = with_bucket()
    tiers = engine.manager.tiers
    assert tiers is not None
    engine.grant(Candidate(1, PROMPT, 13))
    engine.grant()
    (store,) = engine.moves()
    assert (store.target, store.keys) == (Tier.REMOTE, KEYS)
    assert not tiers.has_shared_news()
    engine.end(store)
    assert tiers.has_shared_news() and not tiers.has_shared_news()
    assert engine.grant().shared_keys == key_prefixes(KEYS)
    assert objects.take_news() is NO_NEWS

    listed = hashlib.sha256(b"listed").digest()
    objects.known.begin_listing(0.0)
    objects.on_listed(ListedPage([NAMES.name_of(listed)], is_last=True), 0.0)
    assert objects.take_news() is NO_NEWS
    assert objects.holds(listed) and objects.holds(listed)
    assert objects.take_news().held == key_prefixes([listed])


def test_latest_news_is_told_again_to_a_new_reader() -> None:
    """When a report may have been lost with a connection, the latest news is told again."""
    engine, _ = with_bucket()
    engine.grant(Candidate(1, PROMPT, 13))
    engine.grant()
    engine.end_all()
    engine.grant()
    engine.manager.drop_sequences()
    assert engine.grant().shared_keys in (key_prefixes(KEYS), key_prefixes(KEYS[::-1]))


def test_reset_leaves_the_object_store() -> None:
    """A reset of the cache makes nobody believe that the object store is empty."""
    engine, _ = with_bucket()
    engine.grant(Candidate(1, PROMPT, 13))
    engine.grant()
    engine.end_all()
    granted = engine.grant(Candidate(2, OTHER, 13), reset=True)
    assert granted.unshared_keys == b"" and granted.shared_keys == key_prefixes(KEYS)


def test_look_up_with_a_hint() -> None:
    """A look-up tells what a prompt with the same hint would find."""
    engine, _ = with_bucket()
    question = LookUp(1, PROMPT, root_of("a", SIZE), KEYS, num_shared_blocks=2)
    assert engine.manager.look_up(question).num_tokens_by_tier == {"remote": 2 * SIZE}
