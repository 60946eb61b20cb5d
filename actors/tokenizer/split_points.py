"""At which added tokens of a tokenizer a text may be cut, so that the parts tokenise as the whole does.

The tokenizers library matches added tokens with `normalized: false` in the raw text, leftmost and longest first;
what lies between two of them is normalised, split and encoded by itself. So a text can be cut right before such a
token, if nothing else looks across that place. `find_seams` checks this, token by token, and refuses the whole
tokenizer where it does not know a component or where a trial disagrees.

Tokens that take whitespace on their left (`lstrip`), or begin with whitespace, which a neighbour may take, are not cut
at. Where some token matches whole words only (`single_word`), what lies behind a cut decides what is found before it:
then nothing is cut.
A part that begins with an added token does not have its first words at the text's beginning, where some
pre-tokenizers (Metaspace, `prepend_scheme: first`) treat them differently. So cuts are before such tokens, not after.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tokenizers

from ..shared.tokenizers_library import Library
from .segment_cache import MIN_CHARACTERS, Seams, TooDeep

LOCAL_KINDS = {
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
"""Components that work on what lies between two added tokens and on nothing else, or, behind the model, leave ids of a
text without special tokens alone."""

NUM_TRIED = 8
"""Tokens that are tried at load; some vocabularies have thousands of them, all alike."""
NO_SEAMS = Seams((), ())


def find_seams(tokenizer: tokenizers.Tokenizer, min_characters: int = MIN_CHARACTERS) -> Seams:
    """Where texts for this tokenizer may be cut, each part at least so long; nowhere, if that is not certain."""
    return seams_of(Library(tokenizer), json.loads(tokenizer.to_str()), min_characters)


def seams_of(library: Library, parts: Mapping[str, Any], min_characters: int = MIN_CHARACTERS) -> Seams:
    """The same, of a tokenizer whose JSON has been read."""
    tokenizer = library.tokenizer
    matched = [token for token in parts["added_tokens"] if not token["normalized"] and token["content"]]
    if not _is_local(parts) or tokenizer.encode_special_tokens or any(token["single_word"] for token in matched):
        return NO_SEAMS
    cut_before = [t["content"] for t in matched if not t["lstrip"] and not t["content"][0].isspace()]
    try:
        seams = Seams(cut_before, [token["content"] for token in matched], min_characters)
    except TooDeep:
        return NO_SEAMS
    trials = _trials(cut_before[:NUM_TRIED])
    return seams if all(_agrees(library, seams, text) for text in trials) else NO_SEAMS


def _is_local(parts: Mapping[str, Any]) -> bool:
    if parts["model"].get("dropout"):
        return False  # drawn anew each time
    return all(kind in known for name, known in LOCAL_KINDS.items() for kind in _kinds(parts[name]))


def _kinds(component: Mapping[str, Any] | None) -> Iterator[str]:
    """Of a component and of those that it is a sequence of."""
    if component is None:
        return
    yield component.get("type", "")
    for name in ("normalizers", "pretokenizers", "processors"):
        for inner in component.get(name, ()):
            yield from _kinds(inner)


def _agrees(library: Library, seams: Seams, text: str) -> bool:
    starts = seams.starts(text)
    ends = [*starts[1:], len(text)]
    parts: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        parts += library.list_ids(text[start:end], add_special_tokens=False)
    return parts == library.list_ids(text, add_special_tokens=False)


def _trials(tokens: Iterable[str]) -> Iterator[str]:
    """Texts with each token between words, spaces and line breaks."""
    words = "it's a trial of 12345 words,\n\n  Ünïcode ✓ too"
    said = words * -(-MIN_CHARACTERS // len(words))
    for token in tokens:
        yield f"{said}{token}{said} {token} {said}\n{token}\n{said}{token}"
