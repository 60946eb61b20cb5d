"""The key changes that an engine with lower tiers reports: what can be found in any tier, and in which the fastest."""

from __future__ import annotations

import random

from quipu.actors.engine.block_manager.key_changes import NO_CHANGE, KeyChange, KeyChanges
from quipu.actors.engine.block_manager.tiered_key_changes import TieredKeyChanges, make_key_changes
from quipu.actors.messages.tiers import CACHE_TIERS, LOWER_TIERS, Tier
from tests.actors.key_reader import split

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


def store(changes: TieredKeyChanges, *keys: bytes, tier: Tier = Tier.DEVICE) -> None:
    changes.on_stored(keys, b"", [], 0, 0, tier=tier)


def test_block_moves_to_the_host() -> None:
    """A block that is on the host when the device evicts it, or soon after, is reported as lowered, not as removed."""
    changes = TieredKeyChanges()
    store(changes, A, B)
    assert changes.take() == KeyChange(A[:8] + B[:8], b"", is_cleared=False)
    store(changes, A, tier=Tier.HOST)
    assert changes.take() == KeyChange(b"", b"", is_cleared=False), "it is still on the device"
    changes.on_removed([B, A])
    store(changes, B, tier=Tier.HOST)
    moved = changes.take()
    assert (moved.stored, moved.removed, set(split(moved.lowered["host"]))) == (b"", b"", {A[:8], B[:8]})
    assert changes.take() == NO_CHANGE


def test_block_comes_back() -> None:
    """A block that is loaded again is reported as raised, and as lowered again once the device has evicted it."""
    changes = TieredKeyChanges()
    store(changes, A)
    store(changes, A, tier=Tier.HOST)
    changes.on_removed([A])
    assert changes.take() == KeyChange(A[:8], b"", is_cleared=False, lowered={"host": A[:8]})
    store(changes, A)
    assert changes.take() == KeyChange(b"", b"", is_cleared=False, raised=A[:8])
    changes.on_removed([A])
    assert changes.take() == KeyChange(b"", b"", is_cleared=False, lowered={"host": A[:8]})


def test_removed_from_the_last_tier() -> None:
    """Only a key that has left both tiers is reported as removed; one that came and went since the last report is not
    mentioned."""
    changes = TieredKeyChanges()
    store(changes, A)
    store(changes, A, tier=Tier.HOST)
    changes.take()
    changes.on_removed([A], Tier.HOST)
    assert changes.take() == KeyChange(b"", b"", is_cleared=False)
    store(changes, B)
    changes.on_removed([A, B])
    assert changes.take() == KeyChange(b"", A[:8], is_cleared=False)


def test_reset() -> None:
    """A reset voids what was collected; what is stored after it counts."""
    changes = TieredKeyChanges()
    store(changes, A, B)
    store(changes, B, tier=Tier.HOST)
    changes.on_cleared()
    store(changes, C)
    assert changes.take() == KeyChange(C[:8], b"", is_cleared=True)


def test_new_reader() -> None:
    """A reader that knows nothing gets everything, in both tiers."""
    changes = TieredKeyChanges()
    store(changes, A, B)
    store(changes, C, tier=Tier.HOST)
    changes.take()
    changes.restart([A])
    change = changes.take()
    assert change.is_cleared and set(split(change.stored)) == {A[:8], C[:8]}
    assert (change.removed, change.lowered) == (b"", {"host": C[:8]})


def test_fastest_tier() -> None:
    """A key is reported as lowered to the fastest tier that it is in, whenever that changes."""
    changes = TieredKeyChanges()
    store(changes, A)
    for tier in LOWER_TIERS:
        store(changes, A, tier=tier)
    assert changes.take() == KeyChange(A[:8], b"", is_cleared=False), "it is on the device"
    changes.on_removed([A])
    assert changes.take() == KeyChange(b"", b"", is_cleared=False, lowered={"host": A[:8]})
    changes.on_removed([A], Tier.DISK)
    assert changes.take() == KeyChange(b"", b"", is_cleared=False)
    changes.on_removed([A], Tier.HOST)
    assert changes.take() == KeyChange(b"", b"", is_cleared=False, lowered={"remote": A[:8]})
    store(changes, A, tier=Tier.DISK)
    store(changes, B, tier=Tier.DISK)
    store(changes, C, tier=Tier.HOST)
    lowered = {"disk": A[:8] + B[:8], "host": C[:8]}
    assert changes.take() == KeyChange(B[:8] + C[:8], b"", is_cleared=False, lowered=lowered)
    store(changes, A)
    changes.on_removed([B], Tier.DISK)
    assert changes.take() == KeyChange(b"", B[:8], is_cleared=False, raised=A[:8])


def test_any_order() -> None:
    """A reader that applies every change knows which keys are in any tier, and the fastest tier of each."""
    rng = random.Random(7)
    keys = [bytes([index]) * 32 for index in range(6)]
    changes = TieredKeyChanges()
    held: dict[Tier, set[bytes]] = {tier: set() for tier in CACHE_TIERS}
    anywhere: set[bytes] = set()
    lowered: dict[bytes, str] = {}
    for _ in range(8000):
        tier, key = rng.choice(CACHE_TIERS), rng.choice(keys)
        if rng.random() < 0.005:
            changes.on_cleared()
            held = {tier: set() for tier in CACHE_TIERS}
        elif key in held[tier]:
            changes.on_removed([key], tier)
            held[tier].remove(key)
        else:
            store(changes, key, tier=tier)
            held[tier].add(key)
        if rng.random() < 0.3:
            change = changes.take()
            if change.is_cleared:
                anywhere, lowered = set(), {}
            assert anywhere.isdisjoint(split(change.stored)) and anywhere.issuperset(split(change.removed))
            anywhere = anywhere - set(split(change.removed)) | set(split(change.stored))
            assert lowered.keys() >= set(split(change.raised)), "only what was lowered is raised"
            for gone in (*split(change.removed), *split(change.raised)):
                lowered.pop(gone, None)
            for name, prefixes in change.lowered.items():
                assert not any(lowered.get(prefix) == name for prefix in split(prefixes)), "told twice"
                lowered |= dict.fromkeys(split(prefixes), name)
            fastest = {key[:8]: next(t for t in CACHE_TIERS if key in held[t]) for key in set().union(*held.values())}
            assert anywhere == fastest.keys()
            assert lowered == {key: tier for key, tier in fastest.items() if tier is not Tier.DEVICE}


def test_without_lower_tiers() -> None:
    """An engine without lower tiers does not track the tiers of its keys."""
    assert type(make_key_changes(has_lower_tiers=False)) is KeyChanges
    assert type(make_key_changes(has_lower_tiers=True)) is TieredKeyChanges
