"""Where a rendered chat may be cut into segments that tokenise by themselves, and the ids of segments seen before.

A chat grows at its end: all segments but the last are those of the turn before, and need not be tokenised again.
Used by `vocabulary.py`; `split_points.py` finds the tokens to cut at; the tokenizer keeps the cache.

What must always hold: the ids of the segments, joined, are the ids of the whole text; nobody finds what another owner
has put in; the cache never holds more bytes than it was given.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import groupby

import attrs

MIN_CHARACTERS = 256
"""A shorter segment joins the next one: to look it up would cost as much as to tokenise it."""
ENTRY_BYTES = 400
"""What an entry takes besides its text and ids: the key, the dictionary's place, the headers of four objects."""
WINDOW_CHARACTERS = 1 << 16
"""A text is searched for cuts in pieces of this length."""

MAX_DEPTH = 64
"""Added tokens that may begin with one another, in a row: a pattern nests as deep."""


class TooDeep(ValueError):
    """Added tokens begin with one another more than MAX_DEPTH times."""


class Seams:
    """Finds where a text may be cut: right before certain added tokens, where the tokenizer splits it by itself.

    Of tokens that begin at one place the longest counts, and none begins inside another: as the tokenizer has it.
    """

    def __init__(
        self, cut_before: Collection[str], others: Collection[str], min_characters: int = MIN_CHARACTERS
    ) -> None:
        """`others`: the added tokens that are matched in the same pass, and not cut at. Raises TooDeep."""
        self._min_characters = min_characters
        self._cut_before = frozenset(cut_before)
        self._pattern = re.compile(_any_of(sorted({*cut_before, *others}))) if cut_before else None
        self._longest = max(map(len, (*cut_before, *others)), default=0)

    def starts(self, text: str) -> list[int]:
        """First character of each segment; the first is 0. Where a text goes on they stay, but for the last perhaps."""
        starts = [0]
        if self._pattern is None or len(text) < self._min_characters:
            return starts
        at = 0
        while at < len(text):
            # in windows: the search holds the interpreter lock from one match to the next
            border = at + WINDOW_CHARACTERS
            at = border
            for match in self._pattern.finditer(text, border - WINDOW_CHARACTERS, border + self._longest):
                if match.start() >= border:
                    break
                if match.start() - starts[-1] >= self._min_characters and match[0] in self._cut_before:
                    starts.append(match.start())
                at = max(border, match.end())
        return starts


def _any_of(tokens: Sequence[str], depth: int = 0) -> str:
    """A pattern for the longest of `tokens` (sorted, no two alike), a tree of their beginnings: vocabularies may have
    thousands of them, and a list would be tried from end to end wherever one might begin."""
    if depth > MAX_DEPTH:
        raise TooDeep
    first, last = tokens[0], tokens[-1]
    common = next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    ends_here = len(first) == common
    branches = [
        _any_of([token[common:] for token in group], depth + 1)
        for _, group in groupby(tokens[ends_here:], lambda t: t[common])
    ]
    if not branches:
        return re.escape(first)
    inner = branches[0] if len(branches) == 1 and not ends_here else f"(?:{'|'.join(branches)})"
    return re.escape(first[:common]) + inner + ("?" if ends_here else "")


@attrs.frozen
class _Entry:
    token_ids: array[int]
    num_bytes: int
    """As they were counted: a string may grow an encoding of itself later."""


class SegmentCache:
    """Ids by owner and text, the least recently used forgotten first. Several threads may use it at once."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of all owners together; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, owner: str, text: str) -> array[int] | None:
        """The ids of `text`, where this owner has put them in and they are still kept."""
        key = (owner, text)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.token_ids

    def keep(self, owner: str, text: str, token_ids: array[int]) -> None:
        """Remember `token_ids`, and forget others where there is no room."""
        size = ENTRY_BYTES + sys.getsizeof(text) + len(token_ids) * token_ids.itemsize
        if size > self._max_bytes:
            return
        with self._lock:
            if (owner, text) in self._entries:
                return
            self._entries[owner, text] = _Entry(token_ids, size)
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.num_bytes -= oldest.num_bytes
