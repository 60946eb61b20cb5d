"""Which two engines a prompt gets: by load, by what they hold, and by what is left to compute."""

from __future__ import annotations

import pytest

from quipu.actors.channel import Channel
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.request_desk.engine_pool import EngineMessage
from quipu.actors.router.pairs import RUNNING_BLOCKS, PairPolicy, Plan, stays
from quipu.actors.router.route_store import ReadyEngine
from quipu.actors.router.routing import Routing

PREFILL, DECODE, MIXED = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.MIXED
SIZE = 4
NUM_TOKENS = 42
KEYS = [bytes([depth]).ljust(32, b".") for depth in range(NUM_TOKENS // SIZE)]


class Fleet:
    """A policy, and engines of these roles, in this order."""

    def __init__(self, *roles: EngineRole, local_tokens: int = 0, numerics: str = "") -> None:
        self.routing = Routing(block_size=SIZE, prefill_budget=64, seed=1)
        self.policy = PairPolicy(self.routing, local_tokens)
        self.engines = [
            ReadyEngine(
                engine_id,
                1,
                self.routing.add_engine(1000),
                numerics[engine_id : engine_id + 1],
                Channel[EngineMessage](1),
                role,
            )
            for engine_id, role in enumerate(roles)
        ]

    def plan(self, *, reads_cache: bool = True, continues: bool = True) -> Plan:
        return self.policy.plan(self.engines, KEYS, NUM_TOKENS, reads_cache=reads_cache, continues=continues)

    def store(self, engine_id: int, num_blocks: int) -> None:
        """Have an engine hold the beginning of the prompt."""
        self.routing.on_stored(self.engines[engine_id].slot, [key[:8] for key in KEYS[:num_blocks]])

    def places(self, plan: Plan) -> tuple[list[int], int | None]:
        """Return the ids of the engines that may compute a prompt, and of that which continues it."""
        by_slot = {engine.slot: engine.engine_id for engine in self.engines}
        return [by_slot[slot] for slot in plan.slots or ()], None if plan.decode is None else plan.decode.engine_id


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([MIXED, MIXED], ([0, 1], None)),
        ([PREFILL, PREFILL], ([0, 1], None)),
        ([DECODE, DECODE], ([0, 1], None)),
        ([PREFILL, DECODE], ([0], 1)),
        ([DECODE, PREFILL, MIXED], ([1, 2], 0)),
        ([PREFILL, MIXED], ([0, 1], 1)),
        ([], ([], None)),
    ],
)
def test_sides(roles: list[EngineRole], expected: tuple[list[int], int | None]) -> None:
    """Prompts are computed by engines for prefill and mixed ones, and continue on others; without these, anywhere."""
    fleet = Fleet(*roles)
    assert fleet.places(fleet.plan()) == expected


def test_nothing_to_continue() -> None:
    """What ends with its prompt goes to an engine that computes prompts."""
    fleet = Fleet(DECODE, PREFILL, MIXED)
    assert fleet.places(fleet.plan(continues=False)) == ([1, 2], None)


@pytest.mark.parametrize(
    ("num_held", "local_tokens", "is_local"),
    [(0, 0, False), (9, 0, False), (10, 0, True), (0, 41, False), (0, 42, True), (5, 21, False), (5, 22, True)],
)
def test_what_is_left_is_computed_there(num_held: int, local_tokens: int, is_local: bool) -> None:
    """The decode side computes a prompt itself if little of it is missing there, or nothing that can be fetched."""
    fleet = Fleet(PREFILL, DECODE, local_tokens=local_tokens)
    fleet.store(1, num_held)
    assert fleet.places(fleet.plan()) == (([1], None) if is_local else ([0], 1))


def test_what_reads_no_cache_is_computed_whole() -> None:
    """Of a prompt that is not read from the cache, all of it is missing."""
    fleet = Fleet(PREFILL, DECODE, local_tokens=NUM_TOKENS - 1)
    fleet.store(1, len(KEYS))
    assert fleet.places(fleet.plan(reads_cache=False)) == ([0], 1)
    assert fleet.places(fleet.plan()) == ([1], None)


def test_held_blocks_are_worth_load() -> None:
    """An engine that holds blocks of a prompt is chosen to continue it, unless it has that much more to do."""
    fleet = Fleet(PREFILL, DECODE, DECODE)
    fleet.store(2, 6)
    slot = fleet.engines[2].slot
    assert fleet.places(fleet.plan()) == ([0], 2)
    fleet.routing.loads.blocks[slot] = 5
    assert fleet.places(fleet.plan()) == ([0], 2)
    fleet.routing.loads.blocks[slot] = 7
    assert fleet.places(fleet.plan()) == ([0], 1)


def test_running_sequences_are_load() -> None:
    """A sequence that runs weighs as much as some blocks; of equal engines the one with fewer of them is chosen."""
    fleet = Fleet(PREFILL, DECODE, DECODE)
    loads, (_, first, second) = fleet.routing.loads, [engine.slot for engine in fleet.engines]
    loads.running[first] = 1
    assert fleet.places(fleet.plan()) == ([0], 2)
    loads.blocks[second] = RUNNING_BLOCKS
    assert fleet.places(fleet.plan()) == ([0], 2)
    loads.blocks[second] = RUNNING_BLOCKS + 1
    assert fleet.places(fleet.plan()) == ([0], 1)


def test_only_engines_that_compute_the_same_bits() -> None:
    """A prompt is shared by engines that compute the same bits, or else by none."""
    fleet = Fleet(PREFILL, PREFILL, DECODE, numerics="aba")
    assert fleet.places(fleet.plan()) == ([0], 2)
    alone = Fleet(PREFILL, PREFILL, DECODE, numerics="bba")
    assert alone.places(alone.plan()) == ([2], None)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [(MIXED, MIXED, True), (PREFILL, MIXED, False), (MIXED, DECODE, False), (PREFILL, DECODE, False)],
)
def test_mixed_engines_keep_what_they_compute(prefill: EngineRole, decode: EngineRole, expected: bool) -> None:
    """Between two mixed engines nothing is handed over, nor where both are the same."""
    first, second = Fleet(prefill, decode).engines
    assert stays(first, second) is expected
    assert stays(first, first) and stays(second, second)
