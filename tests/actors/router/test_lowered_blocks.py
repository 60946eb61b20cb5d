"""Blocks that an engine has only in lower tiers: routed to, and told apart from others in the prefix tree."""

from __future__ import annotations

import hashlib

from quipu.actors.cache_insight.cache_figures import HeldBlocks
from quipu.actors.channel import Channel
from quipu.actors.messages.accountant import Refused, Routed
from quipu.actors.messages.router import EngineDown, EngineUp
from quipu.actors.messages.tiers import Tier
from quipu.actors.request_desk.engine_pool import EnginePool
from quipu.actors.request_desk.live_sequences import LiveSequences
from quipu.actors.router.dispatch import Dispatch
from quipu.actors.router.key_index import NUM_SHARDS
from quipu.actors.router.lowered_blocks import LoweredBlocks
from quipu.actors.router.route_store import RouterMessage, RouteStore
from quipu.actors.router.routing import Routing
from tests.step_reports import report

BLOCK = 4
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(8)]


def prefixes(*keys: bytes) -> bytes:
    return b"".join(key[:8] for key in keys)


class Engines:
    """A router, and reports that tell it what two engines hold."""

    def __init__(self) -> None:
        self.store = RouteStore(Routing(block_size=BLOCK, prefill_budget=64, seed=1))
        pool = EnginePool()
        sequences = LiveSequences(Channel[RouterMessage](1), 10)
        self.dispatch = Dispatch(self.store, pool, sequences, Channel[Routed | Refused](1), resume_on="any")
        for engine_id in range(2):
            pool.add()
            self.dispatch.handle_news(EngineUp(engine_id, engine_id, 100, "same"))
        self._num_reports = 0

    def tell(self, engine_id: int, **columns: object) -> None:
        """Have an engine report these columns."""
        self.tell_as(engine_id, engine_id, **columns)

    def tell_as(self, engine_id: int, incarnation: int, **columns: object) -> None:
        self._num_reports += 1
        told = report(number=self._num_reports, engine_id=engine_id, incarnation=incarnation, **columns)
        assert not self.store.may_skip(told)
        self.dispatch.handle_news(told)

    def held(self) -> dict[int, HeldBlocks]:
        return self.store.held_blocks(KEYS)

    def best(self) -> int:
        """Return the engine that a prompt with these keys is sent to."""
        slot = self.store.routing.preview(KEYS, BLOCK * len(KEYS) + 1)
        return self.store.by_slot[slot].engine_id


def test_prompt_goes_where_its_blocks_are_on_the_host() -> None:
    """An engine that holds a prompt on its host tier is chosen before one that has less of it on the device."""
    engines = Engines()
    engines.tell(0, stored_keys=prefixes(*KEYS[:2]))
    engines.tell(1, stored_keys=prefixes(*KEYS))
    engines.tell(1, lowered_keys={"host": prefixes(*KEYS)})
    assert engines.best() == 1
    assert engines.held() == {0: HeldBlocks(2), 1: HeldBlocks(8, {"host": 8})}
    engines.tell(1, removed_keys=prefixes(*KEYS[1:]))
    assert engines.best() == 0
    assert engines.held() == {0: HeldBlocks(2), 1: HeldBlocks(1, {"host": 1})}


def test_blocks_that_move() -> None:
    """Blocks are counted by tier, however often they have moved."""
    engines = Engines()
    engines.tell(0, stored_keys=prefixes(*KEYS))
    for num_on_device in (5, 1, 0):
        engines.tell(0, lowered_keys={"host": prefixes(*KEYS[num_on_device:])})
        assert engines.held() == {0: HeldBlocks(8, {"host": 8 - num_on_device})}
    engines.tell(0, raised_keys=prefixes(*KEYS[:3]))
    assert engines.held() == {0: HeldBlocks(8, {"host": 5})}
    engines.tell(0, removed_keys=prefixes(*KEYS[6:]))
    assert engines.held() == {0: HeldBlocks(6, {"host": 3})}


def test_engine_that_has_cleared_its_cache() -> None:
    """After a cache was cleared no tier has a block; blocks stored later are on the device."""
    engines = Engines()
    engines.tell(0, stored_keys=prefixes(*KEYS), lowered_keys={"host": prefixes(*KEYS[2:])})
    engines.tell(0, is_cleared=True, stored_keys=prefixes(*KEYS[:4]))
    assert engines.held() == {0: HeldBlocks(4)}


def test_engine_that_is_gone() -> None:
    """Nothing is kept of an engine that has died, and its successor has everything on the device."""
    engines = Engines()
    engines.tell(0, stored_keys=prefixes(*KEYS), lowered_keys={"host": prefixes(*KEYS)})
    engines.dispatch.handle_news(EngineDown(0, 0))
    assert engines.held() == {}
    engines.dispatch.handle_news(EngineUp(0, 7, 100, "same"))
    engines.tell_as(0, 7, stored_keys=prefixes(*KEYS))
    assert engines.held() == {0: HeldBlocks(8)}


def test_blocks_in_every_tier() -> None:
    """Blocks are counted in the fastest tier that their engine has last told of."""
    engines = Engines()
    lowered = {"host": prefixes(*KEYS[2:4]), "disk": prefixes(*KEYS[4:])}
    engines.tell(0, stored_keys=prefixes(*KEYS), lowered_keys=lowered)
    assert engines.held() == {0: HeldBlocks(8, {"host": 2, "disk": 4})}
    engines.tell(0, lowered_keys={"disk": prefixes(*KEYS[2:4])})
    assert engines.held() == {0: HeldBlocks(8, {"disk": 6})}
    engines.tell(0, raised_keys=prefixes(*KEYS[2:4]), removed_keys=prefixes(*KEYS[6:]))
    assert engines.held() == {0: HeldBlocks(6, {"disk": 2})}


def test_nothing_is_left_of_gone_engines() -> None:
    """The keys of engines that are gone are swept while others go on, and only then their slots are used again."""
    lowered = LoweredBlocks()
    assert [lowered.take_slot() for _ in range(2)] == [0, 1]
    lowered.add(0, Tier.DISK, KEYS)
    lowered.release_slot(0)
    assert lowered.take_slot() == 2
    for _ in range(NUM_SHARDS):
        lowered.add(1, Tier.HOST, KEYS[:1])
        lowered.sweep()
    assert len(lowered) == 1 and lowered.take_slot() == 0
    assert lowered.num_by_tier(0, KEYS) == {}
