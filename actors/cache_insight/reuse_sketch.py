"""How blocks are used again, from the keys of all prompts: a sketch of bounded size.

Used by `reuse_window.py`. `make_sketch` makes the one in C where it is built (`shared/native/csrc/reuse.c`), otherwise
`ReuseSketch`, its reference; both count the same.

A sketch answers two questions about an LRU cache of blocks that it never sees:

    how large must it be?   A sample of keys is kept on a timeline of last uses. A key that is used again was at the
                            distance of the keys used since then: a cache of that many blocks would still have it. The
                            sample has all keys until there are too many; then those whose hash is small (SHARDS,
                            Waldspurger et al., FAST 2015), so that a distance in the sample times its inverse share is
                            one among all keys.
    how many are new?       Exact while all keys are in the sample, then each key changes a HyperLogLog; a change counts
                            as many keys as it stands for (Ting, KDD 2014).

Blocks of one prompt are looked up first to last, and then count as used last to first, as a pool frees them: the end of
a prompt goes first.

What must always hold: memory and the time of a call do not grow with the number of keys seen; no more than
`MAX_SAMPLED_IN_CALL` keys of a prompt are in the sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from ..shared.block_keys import KEY_PREFIX_BYTES
from ..shared.native import IS_COMPILED

NUM_BINS = 528
"""Of distances: 16 exact ones, then 16 for each power of two."""
MAX_SAMPLED_IN_CALL = 1024
MAX_SHIFT = 24
_SCALE_BITS = 27
_WORD_BITS = 64


def bin_of(distance: int) -> int:
    """Return the bin of a distance in blocks, or of any number that is not negative."""
    if distance < 16:
        return distance
    exponent = distance.bit_length() - 1
    return min(NUM_BINS - 1, 16 * (exponent - 3) + (distance >> (exponent - 4) & 15))


def bounds_of(index: int) -> range:
    if index < 16:
        return range(index, index + 1)
    width = 1 << index // 16 - 1
    return range((16 + index % 16) * width, (17 + index % 16) * width)


@attrs.frozen
class _Use:
    place: int
    used_at: int
    owner: int


class ReuseSketch:
    """The sketch in Python."""

    def __init__(self, max_keys: int, register_bits: int) -> None:
        """Keep a sample of at most `max_keys` keys, and a HyperLogLog of `2 ** register_bits` bytes."""
        if not 2 * MAX_SAMPLED_IN_CALL <= max_keys <= 1 << 24 or not 4 <= register_bits <= 20:
            raise ValueError(f"max_keys={max_keys}, register_bits={register_bits}")
        self.shift = 0
        """The sample has one in `2 ** shift` keys."""
        self._max_keys = max_keys
        self._register_bits = register_bits
        self._uses: dict[int, _Use] = {}
        self._places: list[int] = []
        """Of all uses, ascending."""
        self._next_place = 0
        self._registers = bytearray(1 << register_bits)
        self._sum = 1 << (register_bits + _SCALE_BITS)
        self._num_queries = 0
        self._num_new = 0.0
        self._bins = [0] * NUM_BINS

    @property
    def num_keys(self) -> int:
        return len(self._uses)

    @property
    def num_bytes(self) -> int:
        return 300 * len(self._uses) + len(self._registers) + 40 * NUM_BINS

    def access(self, keys: list[bytes], num_found: int, num_matchable: int, now: int, owner: int) -> None:
        """Count the blocks of a prompt, `num_found` of which the cache had.

        The first `num_matchable` could have been found; the others count as used only. `now` is in seconds, and `owner`
        a number to report with `idle`.
        """
        if num_found < 0 or num_matchable < 0:
            raise ValueError("a number of blocks is negative")
        words = [_word_of(key) for key in keys]
        while len(sampled := [i for i, word in enumerate(words) if self._is_sampled(word)]) > MAX_SAMPLED_IN_CALL:
            self._halve()
        is_exact = not self.shift
        num_missing = 0
        for i in sampled:
            use = self._uses.get(words[i])
            num_missing += use is None
            if i >= num_matchable:
                continue
            if use is not None:
                more_recent = len(self._places) - bisect_left(self._places, use.place) - 1
                self._bins[bin_of((more_recent << self.shift) + 1)] += 1 << self.shift
            elif is_exact and i >= num_found:
                self._num_new += 1
        for i in range(num_found, len(words)):
            weight = self._count_distinct(words[i])
            if not is_exact and i < num_matchable:
                self._num_new += weight
        self._num_queries += min(num_matchable, len(keys))
        self._make_room(num_missing)
        for i in reversed(sampled):
            if self._is_sampled(words[i]):
                self._use(words[i], now, owner)

    def touch(self, prefixes: bytes, now: int, owner: int) -> None:
        """Note filled blocks, by the first 8 bytes of each key. Known ones stay as they are."""
        for word in _words_of(prefixes):
            self._count_distinct(word)
            if self._is_sampled(word) and word not in self._uses:
                self._make_room(1)
                if self._is_sampled(word):
                    self._use(word, now, owner)

    def idle(self, prefixes: bytes, now: int) -> list[tuple[int, int]]:
        """Return, for those of these blocks that are in the sample, the owner and the seconds since the last use."""
        uses = [self._uses.get(word) for word in _words_of(prefixes) if self._is_sampled(word)]
        return [(use.owner, now - use.used_at) for use in uses if use is not None]

    def counts(self) -> tuple[int, float, list[int]]:
        """Return blocks asked for, how many of them were new, and by `bin_of` the distances of the others.

        The latter are as many as the sample stands for, which is roughly as many as were not new.
        """
        return self._num_queries, self._num_new, list(self._bins)

    def take(self) -> tuple[int, float, list[int]]:
        """Return the counts, and begin again at 0."""
        counted = self.counts()
        self._num_queries, self._num_new, self._bins = 0, 0.0, [0] * NUM_BINS
        return counted

    def copy(self) -> ReuseSketch:
        twin = ReuseSketch(self._max_keys, self._register_bits)
        twin.shift, twin._next_place, twin._sum = self.shift, self._next_place, self._sum
        twin._uses, twin._places, twin._registers = self._uses.copy(), self._places.copy(), self._registers.copy()
        twin._num_queries, twin._num_new, twin._bins = self.counts()
        return twin

    def _is_sampled(self, word: int) -> bool:
        return (word >> 26 & 0xFFFFFF) >> (MAX_SHIFT - self.shift) == 0

    def _use(self, word: int, now: int, owner: int) -> None:
        before = self._uses.get(word)
        if before is not None:
            del self._places[bisect_left(self._places, before.place)]
        self._uses[word] = _Use(self._next_place, now, owner)
        self._places.append(self._next_place)
        self._next_place += 1

    def _make_room(self, num_missing: int) -> None:
        while len(self._uses) + num_missing > self._max_keys and self.shift < MAX_SHIFT:
            self._halve()

    def _halve(self) -> None:
        self.shift += 1
        self._uses = {word: use for word, use in self._uses.items() if self._is_sampled(word)}
        self._places = sorted(use.place for use in self._uses.values())

    def _count_distinct(self, word: int) -> float:
        """Return how many keys the change of a register stands for, 0 if there is none."""
        place = word >> (_WORD_BITS - self._register_bits)
        lowest = word | 1 << (_SCALE_BITS - 1)
        rank = (lowest & -lowest).bit_length()
        before = self._registers[place]
        if rank <= before:
            return 0.0
        weight = (1 << (self._register_bits + _SCALE_BITS)) / self._sum
        self._sum -= (1 << (_SCALE_BITS - before)) - (1 << (_SCALE_BITS - rank))
        self._registers[place] = rank
        return weight


def _word_of(key: bytes) -> int:
    return int.from_bytes(key[:KEY_PREFIX_BYTES], "little") or 1


def _words_of(prefixes: bytes) -> Iterator[int]:
    for at in range(0, len(prefixes) - KEY_PREFIX_BYTES + 1, KEY_PREFIX_BYTES):
        yield _word_of(prefixes[at : at + KEY_PREFIX_BYTES])


if TYPE_CHECKING or IS_COMPILED:
    from ..shared.native._native import ReuseSketch as CompiledSketch

    Sketch = ReuseSketch | CompiledSketch
else:
    Sketch = ReuseSketch


def make_sketch(max_keys: int, register_bits: int) -> Sketch:
    """Make a sketch as `ReuseSketch` does."""
    return CompiledSketch(max_keys, register_bits) if IS_COMPILED else ReuseSketch(max_keys, register_bits)


def blocks_for(bins: Sequence[int], num_hits: float, share: float) -> int | None:
    """Return how many blocks an LRU cache needs for a share of `num_hits`; None if there are no hits.

    `bins` are distances. If their sum is too small or too large, keys that all prompts use are missing from the sample
    or too often in it, so the smallest distances are corrected.
    """
    corrected = list(bins)
    surplus = num_hits - sum(corrected)
    for index in range(1, NUM_BINS):
        corrected[index] = max(0, corrected[index] + round(surplus))
        surplus = num_hits - sum(corrected)
        if surplus >= 0:
            break
    total = sum(corrected)
    if num_hits < 0.5 or not total:
        return None
    wanted, before = share * total, 0
    for index, number in enumerate(corrected):
        if number and before + number >= wanted:
            distances = bounds_of(index)
            return distances.start + round((len(distances) - 1) * (wanted - before) / number)
        before += number
    return None
