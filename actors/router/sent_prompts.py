"""Prompts that were sent to engines and have not been computed yet: what the engines' caches are about to hold.

Used by `routing.py`. A prompt is registered at depths that are powers of two, so that registering one and looking one
up cost a few entries, however long it is. Of prompts of one engine that begin alike and differ behind the same power of
two, the latest `MAX_COMPARED` are compared.

What must always hold: nothing is kept of a prompt that was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import attrs

MAX_COMPARED = 4
"""Of the prompts of one engine that share an entry, the latest ones."""


@attrs.frozen(eq=False)
class SentPrompt:
    """One prompt on its way."""

    slot: int
    keys: Sequence[bytes]

    def num_shared(self, keys: Sequence[bytes], at_least: int) -> int:
        """Return how many of its first blocks are also those of `keys`, given that `at_least` are.

        A key stands for everything before its block, so that the last common one is found by bisection.
        """
        low, high = at_least, min(len(self.keys), len(keys))
        while low < high:
            middle = (low + high + 1) // 2
            if self.keys[middle - 1] == keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low


class SentPrompts:
    def __init__(self) -> None:
        self._by_key: dict[bytes, dict[int, dict[SentPrompt, None]]] = {}
        """By the keys at the depths 1, 2, 4, …, then by slot; the latest prompt is last."""

    def __len__(self) -> int:
        """Return how many entries there are."""
        return sum(len(prompts) for by_slot in self._by_key.values() for prompts in by_slot.values())

    def add(self, slot: int, keys: Sequence[bytes]) -> SentPrompt:
        """Note that a prompt was sent to an engine."""
        prompt = SentPrompt(slot, keys)
        for depth in _depths(keys):
            self._by_key.setdefault(keys[depth - 1], {}).setdefault(slot, {})[prompt] = None
        return prompt

    def drop(self, prompt: SentPrompt) -> None:
        """Forget a prompt: it was computed, or will not be."""
        for depth in _depths(prompt.keys):
            key = prompt.keys[depth - 1]
            by_slot = self._by_key[key]
            prompts = by_slot[prompt.slot]
            del prompts[prompt]
            if not prompts:
                del by_slot[prompt.slot]
                if not by_slot:
                    del self._by_key[key]

    def match(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return how many of the first `keys` each engine is about to hold, by slot."""
        deepest: dict[int, tuple[int, dict[SentPrompt, None]]] = {}
        for depth in _depths(keys):
            by_slot = self._by_key.get(keys[depth - 1])
            if by_slot is None:
                break
            for slot, prompts in by_slot.items():
                deepest[slot] = depth, prompts
        return {
            slot: max(prompt.num_shared(keys, depth) for prompt in islice(reversed(prompts), MAX_COMPARED))
            for slot, (depth, prompts) in deepest.items()
        }


def _depths(keys: Sequence[bytes]) -> list[int]:
    return [1 << power for power in range(len(keys).bit_length())]
