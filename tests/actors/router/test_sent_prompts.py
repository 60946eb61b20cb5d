"""Prompts on their way: what engines are about to hold is found, and nothing of a dropped prompt is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.router.sent_prompts import MAX_COMPARED, SentPrompts
from tests.actors.router.chains import chain

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


def num_shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(prompt=PATHS, sent=st.lists(st.tuples(st.integers(0, 9), PATHS), max_size=12))
def test_longest_shared_prefix(prompt: list[int], sent: list[tuple[int, list[int]]]) -> None:
    """For each engine, what is found is shared with one of its prompts; if few begin alike, it is the most shared."""
    prompts = SentPrompts()
    kept = [prompts.add(slot, chain(path)) for slot, path in sent]
    found = prompts.match(chain(prompt))
    most: dict[int, int] = {}
    for slot, path in sent:
        if shared := num_shared(prompt, path):
            most[slot] = max(most.get(slot, 0), shared)
    assert found.keys() == most.keys()
    for slot, shared in found.items():
        of_engine = [path for other, path in sent if other == slot]
        assert shared in {num_shared(prompt, path) for path in of_engine}
        if len(of_engine) <= MAX_COMPARED:
            assert shared == most[slot]
    for one in kept:
        prompts.drop(one)
    assert len(prompts) == 0 and prompts.match(chain(prompt)) == {}


def test_a_long_prompt_costs_few_entries() -> None:
    """A prompt of 2,000 blocks is registered at 11 depths."""
    prompts = SentPrompts()
    prompts.add(0, chain([0] * 2000))
    assert len(prompts) == 11
    assert prompts.match(chain([0] * 1999 + [1])) == {0: 1999}
