"""Quotas: whose blocks leave a tier, in what order, and that nobody else's do."""

from __future__ import annotations

import random
from collections import OrderedDict

from quipu.actors.engine.block_manager.publications import Allocation
from quipu.actors.engine.block_manager.tenant_quotas import BlockOwners, TierQuota
from quipu.actors.messages.tiers import Tier
from tests.actors.engine.block_manager.proposals import keys_of

A = keys_of("a", list(range(40)), 4)
B = keys_of("b", list(range(40)), 4)
TENANTS = {number: Allocation([], [], 0, 0, 0, bytes(32), [], tenant=tenant) for number, tenant in ((1, "a"), (2, "b"))}


def owners_of() -> BlockOwners:
    owners = BlockOwners(TENANTS)
    owners.on_stored(A, b"", [], 0, 0, 1)
    owners.on_stored(B, b"", [], 0, 0, 2)
    return owners


def test_least_recently_used_of_the_same_tenant() -> None:
    """Over its quota, a tenant loses the block that it has not used for longest; another tenant loses none."""
    quota = TierQuota(owners_of(), 3, lambda key: False)
    assert quota.add(B[:3]) == []
    assert quota.add(A[:3]) == []
    quota.touch(A[:1])
    assert quota.add(A[3:5]) == A[1:3]
    assert (quota.num_blocks("a"), quota.num_blocks("b")) == (3, 3)


def test_pinned_blocks_leave_last() -> None:
    """Pinned blocks stay while others can leave, and leave when nothing else can."""
    quota = TierQuota(owners_of(), 2, lambda key: key in A[:2])
    assert quota.add(A[:3]) == A[2:3]
    assert quota.add(A[3:4]) == A[3:4]
    all_pinned = TierQuota(owners_of(), 2, lambda key: True)
    assert all_pinned.add(A[:3]) == A[:1]


def test_owner_is_known_while_the_block_is_anywhere() -> None:
    """A block that has left the device and is on the host still belongs to its tenant; once it is nowhere it is
    forgotten."""
    owners = owners_of()
    owners.on_stored(A[:1], b"", [], 0, 0, tier=Tier.HOST)
    owners.on_removed(A)
    assert owners.find(A[0]) == "a" and owners.find(A[1]) is None
    owners.on_removed(A[:1], Tier.HOST)
    owners.on_removed(B)
    assert len(owners) == 0


def test_claimed_by_who_finds_it() -> None:
    """A block of an earlier life of the engine belongs to the first prompt's tenant that finds it."""
    owners = BlockOwners(TENANTS)
    owners.on_stored(A[:2], b"", [], 0, 0, tier=Tier.DISK)
    quota = TierQuota(owners, 1, lambda key: False)
    assert quota.add(A[:2]) == []
    assert owners.claim(A[:3], "a") == A[:2], "what is nowhere has no owner"
    assert quota.add(A[:2]) == A[:1]
    assert owners.claim(A[:2], "b") == []


def test_against_a_plain_record() -> None:
    """Any order of stores, uses and evictions leaves what a list of blocks in the order of their last use would."""
    draw = random.Random(3)
    owners = owners_of()
    quota, plain = TierQuota(owners, 4, lambda key: False), {"a": OrderedDict[bytes, None](), "b": OrderedDict()}
    for _ in range(3000):
        tenant = draw.choice("ab")
        key = draw.choice(A if tenant == "a" else B)
        own = plain[tenant]
        action = draw.randrange(3)
        if action == 0:
            own[key] = None
            own.move_to_end(key)
            expected = [own.popitem(last=False)[0]] if len(own) > 4 else []
            assert quota.add([key]) == expected
        elif action == 1:
            quota.touch([key])
            if key in own:
                own.move_to_end(key)
        else:
            quota.discard([key])
            own.pop(key, None)
        assert quota.num_blocks(tenant) == len(own)
