"""Prompts on their way: what engines are about to hold is found, and nothing is kept of a dropped prompt."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.router.sent_prompts import MAX_RUNS, SentPrompts
from tests.actors.router.chains import chain

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class Keys(list[bytes]):
    """A list of keys to which there can be weak references."""


def num_shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def found_in(prompts: SentPrompts, keys: Sequence[bytes]) -> dict[int, int]:
    return {
        slot: match.num_blocks
        for match in prompts.match(keys)
        for slot in range(match.slots.bit_length())
        if match.slots >> slot & 1
    }


@given(prompt=PATHS, sent=st.lists(st.tuples(st.integers(0, 9), PATHS, st.booleans()), max_size=12))
def test_longest_shared_prefix(prompt: list[int], sent: list[tuple[int, list[int], bool]]) -> None:
    """For each engine, the longest prefix that one of its prompts shares is found, even after some were dropped."""
    prompts = SentPrompts()
    kept = [(prompts.add(slot, chain(path)), path, dropped) for slot, path, dropped in sent]
    for _ in range(2):
        most: dict[int, int] = {}
        for one, path, _ in kept:
            if shared := num_shared(prompt, path):
                most[one.slot] = max(most.get(one.slot, 0), shared)
        assert found_in(prompts, chain(prompt)) == most
        assert len(prompts) <= max(0, 2 * len(kept) - 1)
        for one, _, dropped in kept:
            if dropped:
                prompts.drop(one)
        kept = [(one, path, False) for one, path, dropped in kept if not dropped]
    for one, _, _ in kept:
        prompts.drop(one)
    assert len(prompts) == 0 and prompts.match(chain(prompt)) == []


def test_dropped_prompt_is_not_kept_alive() -> None:
    """The keys of a dropped prompt are released, whichever others share its beginning."""
    paths = ([0] * 8, [0] * 5 + [1] * 3, [0] * 5, [0] * 8, [0] * 3 + [1] * 4)
    for order in itertools.permutations(range(len(paths))):
        prompts = SentPrompts()
        kept = {number: prompts.add(number % 2, Keys(chain(path))) for number, path in enumerate(paths)}
        alive = {number: weakref.ref(one.keys) for number, one in kept.items()}
        for victim in order:
            prompts.drop(kept.pop(victim))
            assert {number for number, keys in alive.items() if keys() is not None} == kept.keys()


def test_a_long_prompt_costs_few_entries() -> None:
    """A prompt of 2,000 blocks is one run; another one that diverges from it adds two."""
    prompts = SentPrompts()
    prompts.add(0, chain([0] * 2000))
    assert len(prompts) == 1
    assert found_in(prompts, chain([0] * 1999 + [1])) == {0: 1999}
    prompts.add(1, chain([0] * 1000 + [1] * 1000))
    assert len(prompts) == 3


@pytest.mark.parametrize("order", [1, -1])
def test_prompts_that_branch_off_each_other(order: int) -> None:
    """Of a prompt with many branches only the first runs are compared; once dropped, none is kept."""
    length = 2 * MAX_RUNS
    prompts, prompt = SentPrompts(), chain([0] * length)
    kept = [prompts.add(0, chain([0] * depth + [1])) for depth in range(1, length)[::order]]
    kept.append(prompts.add(1, prompt))
    assert found_in(prompts, prompt) == {0: MAX_RUNS, 1: MAX_RUNS}
    for one in kept:
        prompts.drop(one)
    assert len(prompts) == 0
