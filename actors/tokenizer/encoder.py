"""From text to token ids, for one checkpoint: refused by its length, split into segments, and encoded by a backend.

`wiring.py` loads one `TextEncoder`. The workers that encode (`text_workers/`) use it with the library in this process
as its backend for short texts, and with a library in another process for long ones.

What must always hold: the ids are the same with every backend; nothing that grows with a text holds the GIL for longer
than a few milliseconds at a time, so it can run in a thread.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import attrs

from ..messages.images import PromptImage
from ..messages.prompts import Breakpoint, ChatPrompt, Mark, PartSpan, PromptText
from ..shared.checkpoint import CheckpointError
from ..shared.tokenizers_library import Library, LibraryPanic
from .chat_template import RenderedChat
from .infill_formats import InfillTokens, find_infill
from .message_spans import spans_of
from .segment_cache import SegmentCache
from .split_points import SplitPoints, find_split_points
from .text_bound import TextBound, find_bound

NO_LIMIT = 1 << 62
"""For `max_tokens`: any number of tokens is allowed."""
COUNT_FIRST_CHARACTERS = 1 << 19
"""A longer text is counted before it is encoded with offsets, which need twice the memory: it may not fit anyway."""
IDS_PER_SLICE = 1 << 16
"""Ids converted to Python integers without releasing the GIL: about 1 ms."""


class EncodingBackend(Protocol):
    """Tokenize texts. Several threads may call its methods at once. They raise LibraryPanic."""

    def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> array[int] | int:
        """Return the ids of `text` (type code "I"), or only their number if there are more than `max_tokens`."""
        ...

    def encode_with_starts(
        self, text: str, *, max_tokens: int, add_special_tokens: bool = True
    ) -> tuple[array[int], array[int]] | int:
        """As `encode`, with the position of each token's first character; the positions never decrease."""
        ...

    def num_tokens_before(self, text: str, end: int) -> int:
        """Return how many tokens lie entirely in the first `end` characters, not counting added special tokens."""
        ...


MAX_OUTLINED_CHARACTERS = 1 << 16
"""Positions further from the beginning of a segment are not looked for."""


@attrs.frozen
class EncodedChat:
    token_ids: list[int]
    breakpoints: tuple[Breakpoint, ...]
    """One for each mark."""
    spans: tuple[PartSpan, ...] = ()
    """The tokens of each part of each message, if the chat asks for them."""
    outline_ends: tuple[int, ...] = ()
    """Tokens that begin before each outlined position. Empty: unknown."""
    text: str = ""
    """What the chat template wrote."""
    images: tuple[PromptImage, ...] = ()


@attrs.frozen
class EncodedText:
    token_ids: list[int]
    echo: PromptText | None = None
    """None if it was not requested, or if there are no tokens."""


@attrs.frozen
class TooManyTokens:
    """A text has more tokens than allowed; their ids were not taken."""

    num_tokens: int
    is_exact: bool
    """False: the text was not tokenized and has at least `num_tokens`."""


@attrs.frozen(eq=False)
class TextEncoder:
    """Encode texts and chats with one backend. Its methods raise LibraryPanic."""

    backend: EncodingBackend
    bound: TextBound
    split_points: SplitPoints
    special_token_ids: frozenset[int]
    """Tokens that are not text, such as those between the messages of a chat."""
    infill: InfillTokens | None = None
    """Tokens around a gap that is to be filled in. None: there are none."""

    def encode_text(
        self, text: str, *, max_tokens: int, with_echo: bool = False, add_special_tokens: bool = True
    ) -> EncodedText | TooManyTokens:
        """Encode a plain prompt, `with_echo` with its text and the offsets of its tokens."""
        if (num_tokens := self.bound.num_tokens(text, _too_many_threshold(max_tokens))) > 0:
            return TooManyTokens(num_tokens, is_exact=False)
        if with_echo and len(text) > COUNT_FIRST_CHARACTERS:
            counted = self.count(text, max_tokens=max_tokens)
            if isinstance(counted, TooManyTokens):
                return counted
        if with_echo:
            found = self.backend.encode_with_starts(text, max_tokens=max_tokens, add_special_tokens=add_special_tokens)
            if isinstance(found, int):
                return TooManyTokens(found, is_exact=True)
            ids, starts = map(as_list, found)
            return EncodedText(ids, PromptText(text, ids[0], tuple(starts)) if ids else None)
        encoded = self.backend.encode(text, max_tokens=max_tokens, add_special_tokens=add_special_tokens)
        return TooManyTokens(encoded, is_exact=True) if isinstance(encoded, int) else EncodedText(as_list(encoded))

    def encode_part(self, text: str, *, max_tokens: int) -> list[int] | TooManyTokens:
        """Encode a text of which a prompt is made, without the special tokens around a prompt."""
        encoded = self.encode_text(text, max_tokens=max_tokens, add_special_tokens=False)
        return encoded if isinstance(encoded, TooManyTokens) else encoded.token_ids

    def count(self, text: str, *, max_tokens: int) -> int | TooManyTokens:
        if (num_tokens := self.bound.num_tokens(text, _too_many_threshold(max_tokens))) > 0:
            return TooManyTokens(num_tokens, is_exact=False)
        found = self.backend.encode(text, max_tokens=-1)
        num_tokens = found if isinstance(found, int) else len(found)
        return num_tokens if num_tokens <= max_tokens else TooManyTokens(num_tokens, is_exact=True)

    def too_long(self, text: str, *, max_tokens: int) -> TooManyTokens | None:
        """Return a result if the length of `text` alone shows that it exceeds `max_tokens`. Takes constant time."""
        num_tokens = self.bound.num_tokens_by_length(text, _too_many_threshold(max_tokens))
        return TooManyTokens(num_tokens, is_exact=False) if num_tokens else None

    def chat_length_limit(self, *, max_tokens: int) -> int | None:
        """Return the length from which every rendered chat has more than `max_tokens`, or None if there is none."""
        return self.bound.num_characters_for(_too_many_threshold(max_tokens))

    def encode_chat(
        self,
        rendered: RenderedChat,
        marks: Sequence[Mark] = (),
        cache: SegmentCache | None = None,
        owner: str = "",
        outline: ChatPrompt | None = None,
        *,
        max_tokens: int = NO_LIMIT,
        outlined: Sequence[int] = (),
    ) -> EncodedChat | TooManyTokens:
        """Encode a rendered chat. `outline`: the chat, perhaps without messages, if its parts are to be located.

        Segments that `owner` added to `cache` in earlier turns are not tokenized again; the ids are the same.
        `outlined` are ascending positions in the text, for `outline_ends`.
        """
        text = rendered.text
        if (num_tokens := self.bound.num_tokens(text, _too_many_threshold(max_tokens))) > 0:
            return TooManyTokens(num_tokens, is_exact=False)
        starts = self.split_points.starts(text)
        token_ids: array[int] = array("I")
        num_tokens = 0
        first_tokens = []
        for start, end in pairwise([*starts, len(text)]):
            first_tokens.append(num_tokens)
            # the last segment will be longer in the next turn, so it is not worth caching
            num_tokens += self._append_ids(
                text[start:end], cache if end < len(text) else None, owner, token_ids, max_tokens - num_tokens
            )
        if num_tokens > max_tokens:
            return TooManyTokens(num_tokens, is_exact=True)

        def num_tokens_before(end: int) -> int:
            index = bisect_right(starts, end) - 1
            start, num_before = starts[index], first_tokens[index]
            if end == start:
                return num_before
            part = text[start : starts[index + 1]] if index + 1 < len(starts) else text[start:]
            return num_before + self.backend.num_tokens_before(part, end - start)

        positions = map(num_tokens_before, rendered.mark_ends)
        breakpoints = tuple(Breakpoint(at, mark.ttl) for at, mark in zip(positions, marks, strict=True))
        spans: tuple[PartSpan, ...] = ()
        if outline is not None:
            spans = spans_of(outline, self._part_ends(text, starts, first_tokens, rendered.part_ends), num_tokens)
        edges = [*first_tokens, num_tokens]
        outline_ends = self._outline_ends(text, starts, edges, outlined) if outlined else ()
        return EncodedChat(as_list(token_ids), breakpoints, spans, outline_ends, text)

    def _outline_ends(
        self, text: str, starts: Sequence[int], first_tokens: Sequence[int], ends: Sequence[int]
    ) -> tuple[int, ...]:
        """Return how many tokens begin in the first characters of a text, for each of the ascending numbers `ends`.

        The text's segments have these `starts`; `first_tokens` ends with the number of all tokens. Positions within a
        segment are near its beginning, unless the text has no split points: then the result may be empty.
        """
        found: list[int] = []
        edges = [*starts, len(text)]
        at = 0
        while at < len(ends):
            index = bisect_right(edges, ends[at]) - 1
            start, num_before = edges[index], first_tokens[index]
            if ends[at] == start:
                found.append(num_before)
                at += 1
                continue
            inside = ends[at : bisect_left(ends, edges[index + 1], at)]
            if inside[-1] - start > MAX_OUTLINED_CHARACTERS:
                return ()
            part = text[start : inside[-1]]
            encoded = self.backend.encode_with_starts(part, max_tokens=NO_LIMIT, add_special_tokens=False)
            token_starts = array("I") if isinstance(encoded, int) else encoded[1]
            found += [num_before + bisect_left(token_starts, end - start) for end in inside]
            at += len(inside)
        return tuple(found)

    def _part_ends(
        self, text: str, starts: Sequence[int], first_tokens: Sequence[int], ends: Sequence[int]
    ) -> tuple[int, ...]:
        """Return how many tokens begin in the first characters of a text, for each of the numbers `ends`.

        The text's segments have these `starts`, in characters and in tokens. Each is tokenized at most once more.
        """
        of_tokens: dict[int, array[int]] = {}
        """By segment: where its tokens begin."""
        num_tokens = []
        for end in ends:
            index = max(0, bisect_left(starts, end) - 1)
            segment_starts = of_tokens.get(index)
            if segment_starts is None:
                segment = text[starts[index] : starts[index + 1]] if index + 1 < len(starts) else text[starts[index] :]
                found = self.backend.encode_with_starts(segment, max_tokens=NO_LIMIT, add_special_tokens=False)
                segment_starts = of_tokens[index] = array("I") if isinstance(found, int) else found[1]
            num_tokens.append(first_tokens[index] + bisect_left(segment_starts, end - starts[index]) if end else 0)
        return tuple(num_tokens)

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Return the ids of a short word at the beginning of a text, and after a space."""
        bare = word.lstrip()
        plain, spaced = self._ids_of_part(bare), self._ids_of_part(f" {bare}")
        # if the second ends with the first, banning the first bans both
        return [ids for ids in (plain, spaced) if ids and (ids is plain or spaced[-len(plain) :] != plain)]

    def encode_within_text(self, part: str) -> tuple[int, ...]:
        """Return the ids of a short text at the beginning of a line."""
        before, both = self._ids_of_part("\n"), self._ids_of_part(f"\n{part}")
        # an added token may absorb the line break; alone, it has the same id
        return both[len(before) :] if both[: len(before)] == before else self._ids_of_part(part)

    def _ids_of_part(self, text: str) -> tuple[int, ...]:
        ids = self.backend.encode(text, max_tokens=NO_LIMIT, add_special_tokens=False)
        return () if isinstance(ids, int) else tuple(ids)

    def _append_ids(
        self, segment: str, cache: SegmentCache | None, owner: str, token_ids: array[int], max_tokens: int
    ) -> int:
        """Append a segment's ids to `token_ids` unless there are more than `max_tokens`. Return their number."""
        ids = None if cache is None else cache.find(owner, segment)
        if ids is None:
            encoded = self.backend.encode(segment, max_tokens=max_tokens, add_special_tokens=False)
            if isinstance(encoded, int):
                return encoded
            ids = encoded
            if cache is not None:
                cache.add(owner, segment, ids)
        if len(ids) <= max_tokens:
            token_ids += ids
        return len(ids)


def load_encoder(library: Library) -> TextEncoder:
    """Return the encoder that uses `library` in this process. Raises CheckpointError."""
    parts = json.loads(library.tokenizer.to_str())
    added = {token["content"]: token["id"] for token in parts.get("added_tokens", ())}
    try:
        bound, split_points = find_bound(parts, library.normalize), find_split_points(library, parts)
        infill = find_infill(library, added)
    except LibraryPanic as error:
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error
    special_token_ids = frozenset(token["id"] for token in parts.get("added_tokens", ()) if token["special"])
    return TextEncoder(library, bound, split_points, special_token_ids, infill)


def as_list(ids: array[int]) -> list[int]:
    """Convert `ids` to a list, a few milliseconds' worth at a time."""
    if len(ids) <= IDS_PER_SLICE:
        return ids.tolist()
    converted: list[int] = []
    for start in range(0, len(ids), IDS_PER_SLICE):
        converted += ids[start : start + IDS_PER_SLICE].tolist()
    return converted


def _too_many_threshold(max_tokens: int) -> int:
    """Return the lower bound from which a text is refused untokenized, with a margin for rounding."""
    return max_tokens + 3
