"""From text to token ids, for one checkpoint: refused by its length, cut into segments, and encoded by a backend.

Made by `vocabulary.py`. Used by `text_workers/pooled_encoder.py`, with the library in this process for short texts
(`shared/tokenizers_library.py`), and with one in a process of its own for long ones
(`text_workers/encode_processes.py`).

What must always hold: the ids are the same with either backend; nothing that grows with a text holds the interpreter
lock for longer than a few milliseconds at a time, so that a thread may run it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import attrs

from ..messages.prompts import Breakpoint, Mark, PromptText
from .chat_template import RenderedChat
from .segment_cache import Seams, SegmentCache
from .text_bound import TextBound

NO_LIMIT = 1 << 62
"""Tokens: any number of them will do."""
COUNTED_FIRST_CHARACTERS = 1 << 19
"""A longer text is counted before it is encoded with offsets, which take twice the memory: it may not fit anyway."""
LISTED_AT_ONCE = 1 << 16
"""Ids that become numbers of Python without letting go of the interpreter lock: about 1 ms."""


class EncodingBackend(Protocol):
    """What finds tokens in a text. Its methods may be called from several threads at once and raise LibraryPanic."""

    def encode(self, text: str, *, most: int, add_special_tokens: bool = True) -> array[int] | int:
        """Ids of `text` (type code "I"); only their number, where that is more than `most`."""
        ...

    def encode_with_starts(self, text: str, *, most: int) -> tuple[array[int], array[int]] | int:
        """The same, and the first character of each token: never before that of the token before it."""
        ...

    def num_tokens_before(self, text: str, end: int) -> int:
        """Tokens that lie wholly in the first `end` characters of `text`, special ones that are added apart."""
        ...


@attrs.frozen
class EncodedChat:
    token_ids: list[int]
    breakpoints: tuple[Breakpoint, ...]
    """One for each mark."""


@attrs.frozen
class EncodedText:
    token_ids: list[int]
    echo: PromptText | None = None
    """None: nobody asked, or it has no tokens."""


@attrs.frozen
class TooMany:
    """Tokens that a text has, where that is more than it may have: their ids are not taken out."""

    num_tokens: int
    is_exact: bool
    """Else it has at least so many: it was not tokenised."""


@attrs.frozen(eq=False)
class TextEncoder:
    """Encodes texts and chats with one backend. Its methods raise LibraryPanic."""

    backend: EncodingBackend
    bound: TextBound
    seams: Seams

    def encode_text(self, text: str, *, most: int, with_echo: bool = False) -> EncodedText | TooMany:
        """Encode a plain prompt of at most `most` tokens; `with_echo`: with what it takes to give it back."""
        if (num_tokens := self.bound.num_tokens(text, _hopeless(most))) > 0:
            return TooMany(num_tokens, is_exact=False)
        if with_echo and len(text) > COUNTED_FIRST_CHARACTERS:
            counted = self.count(text, most=most)
            if isinstance(counted, TooMany):
                return counted
        if with_echo:
            found = self.backend.encode_with_starts(text, most=most)
            if isinstance(found, int):
                return TooMany(found, is_exact=True)
            ids, starts = map(as_list, found)
            return EncodedText(ids, PromptText(text, ids[0], tuple(starts)) if ids else None)
        encoded = self.backend.encode(text, most=most)
        return TooMany(encoded, is_exact=True) if isinstance(encoded, int) else EncodedText(as_list(encoded))

    def count(self, text: str, *, most: int) -> int | TooMany:
        """How many tokens a plain text has."""
        if (num_tokens := self.bound.num_tokens(text, _hopeless(most))) > 0:
            return TooMany(num_tokens, is_exact=False)
        found = self.backend.encode(text, most=-1)
        num_tokens = found if isinstance(found, int) else len(found)
        return num_tokens if num_tokens <= most else TooMany(num_tokens, is_exact=True)

    def told_by_length(self, text: str, *, most: int) -> TooMany | None:
        """Whether the length alone says that a text has more than `most` tokens."""
        num_tokens = self.bound.told_by_length(text, _hopeless(most))
        return TooMany(num_tokens, is_exact=False) if num_tokens else None

    def longest_chat(self, *, most: int) -> int | None:
        """Characters from which on any rendered chat has more than `most` tokens; None: that cannot be told."""
        return self.bound.most_characters(_hopeless(most))

    def encode_chat(
        self,
        rendered: RenderedChat,
        marks: Sequence[Mark] = (),
        cache: SegmentCache | None = None,
        owner: str = "",
        *,
        most: int = NO_LIMIT,
    ) -> EncodedChat | TooMany:
        """Encode a rendered chat of at most `most` tokens.

        What `owner` has put into `cache` with the turns before is not tokenised again; the ids are the same.
        """
        text = rendered.text
        if (num_tokens := self.bound.num_tokens(text, _hopeless(most))) > 0:
            return TooMany(num_tokens, is_exact=False)
        starts = self.seams.starts(text)
        token_ids: array[int] = array("I")
        num_tokens = 0
        first_tokens = []
        for start, end in pairwise([*starts, len(text)]):
            first_tokens.append(num_tokens)
            # the last segment is about to grow: nobody will ask for it as it is now
            num_tokens += self._take_ids(
                text[start:end], cache if end < len(text) else None, owner, token_ids, most - num_tokens
            )
        if num_tokens > most:
            return TooMany(num_tokens, is_exact=True)

        def num_tokens_before(end: int) -> int:
            """Tokens that lie wholly in the first `end` characters."""
            index = bisect_right(starts, end) - 1
            start, num_before = starts[index], first_tokens[index]
            if end == start:
                return num_before
            part = text[start : starts[index + 1]] if index + 1 < len(starts) else text[start:]
            return num_before + self.backend.num_tokens_before(part, end - start)

        positions = map(num_tokens_before, rendered.mark_ends)
        breakpoints = tuple(Breakpoint(at, mark.ttl) for at, mark in zip(positions, marks, strict=True))
        return EncodedChat(as_list(token_ids), breakpoints)

    def _take_ids(self, segment: str, cache: SegmentCache | None, owner: str, token_ids: array[int], most: int) -> int:
        """Put a segment's ids behind `token_ids`, unless they are more than `most`. Returns how many they are."""
        ids = None if cache is None else cache.find(owner, segment)
        if ids is None:
            encoded = self.backend.encode(segment, most=most, add_special_tokens=False)
            if isinstance(encoded, int):
                return encoded
            ids = encoded
            if cache is not None:
                cache.keep(owner, segment, ids)
        if len(ids) <= most:
            token_ids += ids
        return len(ids)


def as_list(ids: array[int]) -> list[int]:
    """`ids` as numbers of Python, some milliseconds' worth at a time."""
    if len(ids) <= LISTED_AT_ONCE:
        return ids.tolist()
    listed: list[int] = []
    for start in range(0, len(ids), LISTED_AT_ONCE):
        listed += ids[start : start + LISTED_AT_ONCE].tolist()
    return listed


def _hopeless(most: int) -> int:
    """Tokens from which on a text of at most `most` is refused untokenised: with some to spare for rounding."""
    return most + 3
