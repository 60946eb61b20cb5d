"""Where a text can be split so that its parts tokenize exactly as the whole.

The tokenizers library matches added tokens with `normalized: false` in the raw text, leftmost and longest first; the
text between two of them is normalized, pre-tokenized and encoded by itself. So a text can be split right before such a
token, unless something else looks across that position. `find_split_points` checks this for each token, and finds no
split points if it does not know one of the tokenizer's components or if a trial disagrees.

No split is made at tokens that take whitespace on their left (`lstrip`) or begin with whitespace, which a neighbour may
take. If any token matches whole words only (`single_word`), the text after a split decides what is found before it:
then nothing is split. Splits are before added tokens, not after, because some pre-tokenizers (Metaspace,
`prepend_scheme: first`) treat the first words of a text differently.

What must always hold: the ids of the parts, concatenated, are the ids of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from ..shared.tokenizers_library import Library

MIN_CHARACTERS = 256
"""A shorter segment is joined to the next one: looking it up would cost as much as encoding it."""
WINDOW_CHARACTERS = 1 << 16
"""A text is searched for split points in windows of this length."""
MAX_DEPTH = 64
"""Length of a chain of added tokens that are prefixes of one another: the pattern nests as deeply."""
LOCAL_COMPONENTS = {
    "model": {"BPE", "Unigram", "WordLevel", "WordPiece"},
    "normalizer": {
        *("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "Prepend"),
        *("Replace", "Precompiled", "BertNormalizer", "ByteLevel"),
    },
    "pre_tokenizer": {
        *("Sequence", "ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"),
        *("BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts", "FixedLength"),
    },
    "post_processor": {"Sequence", "ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing"},
}
"""Components that look only at the text between two added tokens or, after the model, do not change the ids of a text
without special tokens."""
NUM_TRIED = 8
"""Tokens tried at startup; some vocabularies have thousands of similar ones."""


class NestedTooDeeply(ValueError):
    """More than MAX_DEPTH added tokens are prefixes of one another."""


class SplitPoints:
    """Find where a text can be split: right before certain added tokens.

    As in the tokenizer, the longest of the tokens that start at one position counts, and none starts inside another.
    """

    def __init__(
        self, split_before: Collection[str], others: Collection[str], min_characters: int = MIN_CHARACTERS
    ) -> None:
        """`others`: added tokens that are matched in the same pass, but not split at. Raises NestedTooDeeply."""
        self._min_characters = min_characters
        self._split_before = frozenset(split_before)
        self._pattern = re.compile(_pattern_of(sorted({*split_before, *others}))) if split_before else None
        self._longest = max(map(len, (*split_before, *others)), default=0)

    def starts(self, text: str) -> list[int]:
        """Return the position of each segment's first character, beginning with 0.

        Appending to the text changes none of them, except perhaps the last.
        """
        starts = [0]
        if self._pattern is None or len(text) < self._min_characters:
            return starts
        at = 0
        while at < len(text):
            # in windows, because the search holds the GIL from one match to the next
            window_end = at + WINDOW_CHARACTERS
            at = window_end
            for match in self._pattern.finditer(text, window_end - WINDOW_CHARACTERS, window_end + self._longest):
                if match.start() >= window_end:
                    break
                if match.start() - starts[-1] >= self._min_characters and match[0] in self._split_before:
                    starts.append(match.start())
                at = max(window_end, match.end())
        return starts

    def tokens_between(self, text: str, start: int, end: int) -> list[str]:
        """Return the tokens to split before that are between two positions, in order."""
        if self._pattern is None:
            return []
        end = min(end, start + WINDOW_CHARACTERS)
        return [match[0] for match in self._pattern.finditer(text, start, end) if match[0] in self._split_before]


NO_SPLIT_POINTS = SplitPoints((), ())


def find_split_points(library: Library, parts: Mapping[str, Any], min_characters: int = MIN_CHARACTERS) -> SplitPoints:
    """Return the split points of a tokenizer, none if they are not certain to be safe.

    `parts` is its parsed JSON. Each segment has at least `min_characters`.
    """
    matched = [token for token in parts["added_tokens"] if not token["normalized"] and token["content"]]
    looks_further = library.tokenizer.encode_special_tokens or any(token["single_word"] for token in matched)
    if looks_further or not _is_local(parts):
        return NO_SPLIT_POINTS
    split_before = [t["content"] for t in matched if not t["lstrip"] and not t["content"][0].isspace()]
    try:
        split_points = SplitPoints(split_before, [token["content"] for token in matched], min_characters)
    except NestedTooDeeply:
        return NO_SPLIT_POINTS
    trials = _trial_texts(split_before[:NUM_TRIED])
    return split_points if all(_agrees(library, split_points, text) for text in trials) else NO_SPLIT_POINTS


def _pattern_of(tokens: Sequence[str], depth: int = 0) -> str:
    """Return a regular expression for the longest of `tokens`, which are sorted and unique.

    It is a prefix tree: vocabularies can have thousands of added tokens, and a flat alternation would be tried from end
    to end at each position where one might start.
    """
    if depth > MAX_DEPTH:
        raise NestedTooDeeply
    first, last = tokens[0], tokens[-1]
    common = next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    ends_here = len(first) == common
    branches = [
        _pattern_of([token[common:] for token in group], depth + 1)
        for _, group in groupby(tokens[ends_here:], lambda t: t[common])
    ]
    if not branches:
        return re.escape(first)
    inner = branches[0] if len(branches) == 1 and not ends_here else f"(?:{'|'.join(branches)})"
    return re.escape(first[:common]) + inner + ("?" if ends_here else "")


def _is_local(parts: Mapping[str, Any]) -> bool:
    if parts["model"].get("dropout"):
        return False  # random, so different each time
    return all(kind in known for name, known in LOCAL_COMPONENTS.items() for kind in _kinds(parts[name]))


def _kinds(component: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the type of a component and, if it is a sequence, the types of its elements."""
    if component is None:
        return
    yield component.get("type", "")
    for name in ("normalizers", "pretokenizers", "processors"):
        for inner in component.get(name, ()):
            yield from _kinds(inner)


def _agrees(library: Library, split_points: SplitPoints, text: str) -> bool:
    ids: list[int] = []
    for start, end in pairwise([*split_points.starts(text), len(text)]):
        ids += library.list_ids(text[start:end], add_special_tokens=False)
    return ids == library.list_ids(text, add_special_tokens=False)


def _trial_texts(tokens: Iterable[str]) -> Iterator[str]:
    words = "it's a trial of 12345 words,\n\n  Ünïcode ✓ too"
    filler = words * -(-MIN_CHARACTERS // len(words))
    for token in tokens:
        yield f"{filler}{token}{filler} {token} {filler}\n{token}\n{filler}{token}"
