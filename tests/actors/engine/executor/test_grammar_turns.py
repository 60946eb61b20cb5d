"""Which grammars are compiled ahead of their sequences: tenants take turns, and the number of grammars is bounded."""

from __future__ import annotations

from quipu.actors.engine.executor.grammar_entry import Entry, MaskLimits
from quipu.actors.engine.executor.grammar_turns import AWAITED_S, MAX_AHEAD, MAX_AHEAD_PER_TENANT, GrammarTurns
from quipu.actors.fleet.forks.fork_server import ForkServer


def no_server() -> ForkServer:
    raise OSError


def entry(tenant: str, number: int) -> Entry:
    return Entry(tenant, (tenant, str(number)), no_server, MaskLimits(), 1)


def names(turns: GrammarTurns, count: int = 1000) -> list[str]:
    """Take all entries whose turn it is, and return their tenants and texts."""
    taken = [one for one in (turns.next() for _ in range(count)) if one is not None]
    return [f"{one.tenant}{one.text}" for one in taken]


def test_tenants_take_turns() -> None:
    """One tenant's many grammars do not delay another tenant's by more than one turn."""
    turns = GrammarTurns()
    for number in range(4):
        turns.add(entry("a", number))
    turns.add(entry("b", 0))
    assert names(turns) == ["a0", "b0", "a1", "a2", "a3"]


def test_places_are_bounded() -> None:
    """One tenant gets only a few of all places; a place is free again once its sequence begins, or after a while."""
    now = [0.0]
    turns = GrammarTurns(lambda: now[0])
    its = [entry("a", number) for number in range(2 * MAX_AHEAD_PER_TENANT)]
    for one in its:
        turns.add(one)
    assert len(names(turns)) == MAX_AHEAD_PER_TENANT and turns.num_waiting == MAX_AHEAD_PER_TENANT
    turns.leave(its[0])  # begins
    assert names(turns) == [f"a{MAX_AHEAD_PER_TENANT}"]
    turns.leave(its[-1])  # begins before its turn
    now[0] = AWAITED_S + 1
    assert turns.expired() == its[1 : MAX_AHEAD_PER_TENANT + 1] and turns.expired() == []
    assert len(names(turns)) == MAX_AHEAD_PER_TENANT - 2 and turns.num_waiting == 0
    turns.leave(its[0])  # has left before: changes nothing

    for number in range(2 * MAX_AHEAD):
        turns.add(entry(f"t{number}", number))
    assert len(names(turns)) == MAX_AHEAD - (MAX_AHEAD_PER_TENANT - 2)
