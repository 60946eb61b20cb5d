"""Prompts that were sent to engines and have not been computed yet: what the engines' caches are about to hold.

Used by `routing.py`. They form a tree of runs of blocks: prompts that begin alike share a run until they differ, so
that a prompt costs as many steps as others branch off it, however long it is and however many are on their way. Behind
`MAX_RUNS` branches, no more of a prompt is compared. A key stands for everything before its block, so that where a
prompt leaves a run is found by bisection.

What must always hold: nothing is kept of a prompt that was dropped; a run that no prompt ends at has two that follow,
at least, so that there are fewer runs than twice the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .key_index import Match

MAX_RUNS = 128
"""Of a prompt, from its beginning: prompts that all branch off each other would take milliseconds."""


@attrs.define(eq=False, repr=False)
class _Run:
    """Blocks `start` to `end` of every prompt that begins like `keys`."""

    keys: Sequence[bytes]
    """Those of one of the prompts."""
    start: int
    end: int
    before: _Run | None
    after: dict[bytes, _Run] = attrs.field(factory=dict)
    """By their first key."""
    ending: dict[SentPrompt, None] = attrs.field(factory=dict)
    counts: dict[int, int] = attrs.field(factory=dict)
    """By slot, prompts that have this run."""
    slots: int = 0


@attrs.define(eq=False, repr=False)
class SentPrompt:
    slot: int
    keys: Sequence[bytes]
    last: _Run
    """Where it ends, or where it is not looked at further."""


class SentPrompts:
    def __init__(self) -> None:
        self._root = _Run(keys=(), start=0, end=0, before=None)

    def __len__(self) -> int:
        """Return how many runs there are."""
        runs, number = [self._root], -1
        while runs:
            number += 1
            runs += runs.pop().after.values()
        return number

    def add(self, slot: int, keys: Sequence[bytes]) -> SentPrompt:
        """Note that a prompt of at least one block was sent to an engine."""
        run, depth = self._root, 0
        for _ in range(MAX_RUNS):
            if depth == len(keys):
                break
            run = self._run_of(run, keys, depth)
            depth = run.end
            run.counts[slot] = run.counts.get(slot, 0) + 1
            run.slots |= 1 << slot
        prompt = SentPrompt(slot, keys, run)
        run.ending[prompt] = None
        return prompt

    def drop(self, prompt: SentPrompt) -> None:
        """Forget a prompt: it was computed, or will not be."""
        slot, run = prompt.slot, prompt.last
        del run.ending[prompt]
        while (before := run.before) is not None:
            left = run.counts[slot] - 1
            if left:
                run.counts[slot] = left
            else:
                del run.counts[slot]
                run.slots &= ~(1 << slot)
            if not run.counts:
                del before.after[prompt.keys[run.start]]
            elif len(run.after) == 1 and not run.ending:
                _join(run, before)
            elif run.keys is prompt.keys:
                run.keys = _keys_of_another(run)
            run = before

    def match(self, keys: Sequence[bytes]) -> list[Match]:
        """Return how many of the first `keys` each engine is about to hold; those that hold none are left out."""
        found: list[Match] = []
        run, depth = self._root, 0
        slots = 0
        for _ in range(MAX_RUNS):
            after = run.after.get(keys[depth]) if depth < len(keys) else None
            if after is None:
                break
            if others := slots & ~after.slots:
                found.append(Match(depth, others))
            run, slots = after, after.slots
            depth = _num_shared(run, keys)
            if depth < run.end:
                break
        if slots:
            found.append(Match(depth, slots))
        return found

    def _run_of(self, before: _Run, keys: Sequence[bytes], depth: int) -> _Run:
        """Return the run after `before` that begins with the block at `depth` and has only blocks of `keys`."""
        run = before.after.get(keys[depth])
        if run is None:
            run = before.after[keys[depth]] = _Run(keys, depth, len(keys), before)
            return run
        shared = _num_shared(run, keys)
        if shared == run.end:
            return run
        first = _Run(run.keys, depth, shared, before, {run.keys[shared]: run}, {}, dict(run.counts), run.slots)
        before.after[keys[depth]] = first
        run.before, run.start = first, shared
        return first


def _num_shared(run: _Run, keys: Sequence[bytes]) -> int:
    """Return how many blocks `keys` share with a run and those before it, given that they share its first."""
    low, high, own = run.start + 1, min(run.end, len(keys)), run.keys
    if own[high - 1] == keys[high - 1]:
        return high
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        if own[middle - 1] == keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _keys_of_another(run: _Run) -> Sequence[bytes]:
    """Return the keys of a prompt that has not been dropped."""
    for after in run.after.values():
        return after.keys
    return next(iter(run.ending)).keys


def _join(run: _Run, before: _Run) -> None:
    """Extend the only following run to begin where `run` does."""
    (after,) = run.after.values()
    before.after[after.keys[run.start]] = after
    after.before, after.start = before, run.start
