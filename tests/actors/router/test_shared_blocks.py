"""What the engines have told of the object store: remembered within bounds, and passed on with prompts."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from quipu.actors.cache_insight.cache_figures import HeldBlocks
from quipu.actors.channel import Channel
from quipu.actors.messages.accountant import Refused, Routed
from quipu.actors.messages.block_manager import LookUp
from quipu.actors.messages.router import EngineDown, EngineUp
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from quipu.actors.request_desk.engine_pool import EnginePool
from quipu.actors.request_desk.live_sequences import LiveSequences
from quipu.actors.router import shared_blocks
from quipu.actors.router.dispatch import Dispatch
from quipu.actors.router.key_index import Match
from quipu.actors.router.route_store import RouterMessage, RouteStore
from quipu.actors.router.routing import Routing
from quipu.actors.router.shared_blocks import SharedBlocks
from tests.step_reports import report

BLOCK = 4
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(8)]
TOKENS = [1] * (BLOCK * len(KEYS) + 1)


def prefixes(*keys: bytes) -> bytes:
    return b"".join(key[:8] for key in keys)


class Router:
    """A router of two engines, their reports, and what it sends them."""

    def __init__(self, numerics: tuple[str, str] = ("same", "same")) -> None:
        self.store = RouteStore(Routing(block_size=BLOCK, prefill_budget=64, seed=1))
        self.pool = EnginePool()
        sequences = LiveSequences(Channel[RouterMessage](1), 10)
        self.dispatch = Dispatch(self.store, self.pool, sequences, Channel[Routed | Refused](9), resume_on="any")
        for engine_id in range(2):
            self.pool.add()
            self.dispatch.handle_news(EngineUp(engine_id, engine_id, 100, numerics[engine_id]))
        self._num_sent = 0

    def tell(self, engine_id: int, **columns: Any) -> None:
        self._num_sent += 1
        told = report(number=self._num_sent, engine_id=engine_id, incarnation=engine_id, **columns)
        assert not self.store.may_skip(told)
        self.dispatch.handle_news(told)

    def hint(self, message: Submit | LookUp) -> int:
        """Return how many of its blocks a message says are shared, once an engine has it."""
        self.dispatch.handle_prompt(message)
        (got,) = [got for its in self.pool for got in its.queue.take_nowait()]
        assert isinstance(got, Submit | LookUp)
        assert got.block_keys is message.block_keys
        return got.num_shared_blocks


def submit(sequence_id: int, *, reads_cache: bool = True) -> Submit:
    return Submit(sequence_id, TOKENS, b"r" * 32, KEYS, SamplingParams(max_tokens=1), reads_cache=reads_cache)


def test_prompts_say_what_is_shared() -> None:
    """A prompt tells its engine how much of it the object store has, whichever engine has told of it."""
    router = Router()
    assert router.hint(submit(1)) == 0
    router.tell(0, shared_keys=prefixes(*KEYS[:5]))
    assert router.hint(submit(2)) == router.hint(LookUp(1, TOKENS, b"r" * 32, KEYS)) == 5
    assert router.hint(submit(3, reads_cache=False)) == 0
    router.tell(1, unshared_keys=prefixes(*KEYS[3:5]))
    assert router.hint(submit(4)) == 3


def test_hint_is_made_anew_when_a_prompt_moves() -> None:
    """A prompt that another engine is given later says what is shared then."""
    router = Router()
    router.tell(0, shared_keys=prefixes(*KEYS))
    router.dispatch.handle_prompt(submit(1))
    (engine,) = [its for its in router.pool if len(its.queue)]
    router.tell(1 - engine.engine_id, unshared_keys=prefixes(*KEYS[2:]))
    router.dispatch.handle_news(EngineDown(engine.engine_id, engine.engine_id))
    (moved,) = router.pool[1 - engine.engine_id].queue.take_nowait()
    assert isinstance(moved, Submit) and moved.num_shared_blocks == 2


def test_only_engines_that_compute_the_same_bits_share() -> None:
    """What an engine has stored is of no use to one that computes other bits; one that comes later finds it."""
    router = Router(("one", "other"))
    router.tell(0, shared_keys=prefixes(*KEYS))
    shared, engines = router.store.routing.shared, router.store.engines
    assert shared.match(KEYS) == [Match(8, 1 << engines[0].slot)]
    router.dispatch.handle_news(EngineDown(1, 1))
    router.dispatch.handle_news(EngineUp(1, 2, 100, "one"))
    assert shared.match(KEYS) == [Match(8, 1 << engines[0].slot | 1 << engines[1].slot)]


def test_longest_ago_is_forgotten() -> None:
    """A full group forgets what was told longest ago, and is never larger than it may be."""
    shared = SharedBlocks(max_keys=8)
    shared.add_engine(0, "same")
    keys = [hashlib.sha256(b"many %d" % number).digest() for number in range(100)]
    for key in keys:
        shared.add(0, [key])
        assert shared.num_keys(0) <= 8
        assert shared.match([key]) == [Match(1, 1)]
    assert shared.match(keys[-4:]) == [Match(4, 1)]
    assert shared.match(keys[:1]) == []


def test_groups_without_engines_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many numerics there were, only those of engines that are there are kept for good."""
    monkeypatch.setattr(shared_blocks, "MAX_GROUPS", 2)
    shared = SharedBlocks()
    shared.add_engine(9, "stays")
    shared.add(9, KEYS)
    for number in range(10):
        shared.add_engine(0, f"numerics {number}")
        shared.add(0, KEYS[:3])
        assert shared.match(KEYS) == [Match(8, 1 << 9), Match(3, 1)]
        assert shared.num_groups <= 2
        shared.remove_engine(0)
    assert shared.match(KEYS) == [Match(8, 1 << 9)]


def test_tree_shows_what_is_shared() -> None:
    """Every engine that computes the same bits finds what is in the object store, from where its own blocks end."""
    same, other = Router(), Router(("same", "other"))
    for router in (same, other):
        router.tell(0, stored_keys=prefixes(*KEYS[:2]), shared_keys=prefixes(*KEYS[:5]))
    assert same.store.held_blocks(KEYS) == {0: HeldBlocks(5, {"remote": 3}), 1: HeldBlocks(5, {"remote": 5})}
    assert other.store.held_blocks(KEYS) == {0: HeldBlocks(5, {"remote": 3})}
    same.tell(1, stored_keys=prefixes(*KEYS))
    assert same.store.held_blocks(KEYS)[1] == HeldBlocks(8)
    same.tell(0, unshared_keys=prefixes(*KEYS[2:5]))
    assert same.store.held_blocks(KEYS) == {0: HeldBlocks(2), 1: HeldBlocks(8)}
