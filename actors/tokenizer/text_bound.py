"""A lower bound on the number of tokens in a text, found without tokenizing it: what cannot fit is refused early.

Used by `encoder.py`. A text has at least as many tokens as its bytes divided by those of the longest token in the
vocabulary: its bytes after normalization, without the whitespace that added tokens or the pre-tokenizer may drop.

What must always hold: the bound is never above the real count. Where a component is unknown, or unknown characters are
fused into one token or dropped, there is no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import attrs

from ..shared.token_decoding import byte_alphabet

Parts = Mapping[str, Any]
"""The parsed JSON of a tokenizer, or of one component."""

SLICE_CHARACTERS = 1 << 16
"""A long text is measured in slices of this length: normalizers hold the GIL."""
SLICE_MARGIN_BYTES = 256
"""How much longer a slice may be when normalized without its neighbours."""
MAX_UTF8_BYTES = 4

SHRINK = {"NFC": 4, "NFD": 3, "NFKC": 4, "NFKD": 4}
"""The factor by which each may shrink a text, in bytes: seven bytes become the two of U+0390, a mathematical digit
becomes one byte. ASCII does not change."""
_GROWING = frozenset({"Prepend", "ByteLevel"})
"""Normalizers that never remove anything."""
_BY_CHARACTER = frozenset({*SHRINK, "Lowercase", "StripAccents", "BertNormalizer", "Nmt", "Precompiled"})
"""Normalizers that look only at a character and its immediate neighbours."""
_KEEPS_ASCII = frozenset({*SHRINK, *_GROWING, "Lowercase", "Strip"})
"""Normalizers that do not shrink ASCII, whitespace apart."""
_DROPS_WHITESPACE = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})
_DROPS_NOTHING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_MAY_DROP = frozenset({"Split", "Punctuation"})


@attrs.frozen
class TextBound:
    longest_token_bytes: int
    """0 if there is no bound."""
    shrink: int
    """The normalizer leaves at least one byte of this many; 0 if unknown."""
    is_ascii_kept: bool
    """The normalizer does not shrink ASCII."""
    is_local: bool
    """The normalizer looks only at immediate neighbours, so a text can be normalized in slices."""
    drops_whitespace: bool
    """The normalizer or the pre-tokenizer may drop whitespace anywhere."""
    stripping_tokens: tuple[str, ...]
    """Added tokens that absorb the whitespace beside them."""
    normalize: Callable[[str], str] = attrs.field(repr=False, eq=False)

    def num_characters_for(self, min_tokens: int) -> int | None:
        """Return the length from which every text has at least `min_tokens`, or None if there is no such length."""
        if not self.longest_token_bytes or not self.shrink or self.drops_whitespace or self.stripping_tokens:
            return None
        return (min_tokens - 1) * self.longest_token_bytes * self.shrink + 1

    def num_tokens_of_length(self, num_characters: int) -> int:
        """Return how many tokens every text of this length has at least, if `num_characters_for` returns a number."""
        return _quotient(_quotient(num_characters, self.shrink), self.longest_token_bytes)

    def num_tokens_by_length(self, text: str, threshold: int) -> int:
        """Return the bound by length alone, or 0 if it is below `threshold`. Takes constant time."""
        if self.num_characters_for(threshold) is None:
            return 0
        shrink = 1 if self.is_ascii_kept and text.isascii() else self.shrink
        return self._if_reached(threshold, _quotient(len(text), shrink))

    def num_tokens(self, text: str, threshold: int) -> int:
        """Return how many tokens `text` has at least, or 0 if that is below `threshold`.

        Takes time proportional to the text, in slices that hold the GIL for a few milliseconds each.
        """
        if not self.longest_token_bytes or len(text) * MAX_UTF8_BYTES < threshold * self.longest_token_bytes:
            return 0
        is_dropped = self.drops_whitespace or any(content in text for content in self.stripping_tokens)
        size = _size_without_whitespace if is_dropped else _size
        if self.shrink == 1 or (self.is_ascii_kept and text.isascii()):
            num_bytes = sum(map(size, _slices(text)))
        elif self.is_local:
            num_bytes = sum(max(0, size(self.normalize(piece)) - SLICE_MARGIN_BYTES) for piece in _slices(text))
        elif self.shrink:
            num_bytes = _quotient(sum(map(size, _slices(text))), self.shrink)
        else:
            return 0
        return self._if_reached(threshold, num_bytes)

    def _if_reached(self, threshold: int, num_bytes: int) -> int:
        num_tokens = _quotient(num_bytes, self.longest_token_bytes)
        return num_tokens if num_tokens >= threshold else 0


def find_bound(parts: Parts, normalize: Callable[[str], str]) -> TextBound:
    longest = _longest_token_bytes(parts, normalize)
    normalizers = list(_leaves(parts["normalizer"], "normalizers"))
    pre_tokenizers = list(_leaves(parts["pre_tokenizer"], "pretokenizers"))
    shrinks = list(map(_shrink_of, normalizers))
    if not longest or None in shrinks or not all(map(_is_counted, pre_tokenizers)):
        return TextBound(0, 0, False, False, True, (), str)  # none
    strips = any(part["type"] == "Strip" for part in normalizers)
    drops = any(part["type"] in _DROPS_WHITESPACE for part in pre_tokenizers)
    stripping = [token for token in parts["added_tokens"] if token["lstrip"] or token["rstrip"]]
    # a token that is matched in the normalized text may be there without being in the original text
    hidden = bool(normalizers) and any(token["normalized"] for token in stripping)
    return TextBound(
        longest_token_bytes=longest,
        shrink=prod(shrink or 0 for shrink in shrinks),
        is_ascii_kept=all(part["type"] in _KEEPS_ASCII for part in normalizers),
        is_local=all(map(_is_local, normalizers)),
        drops_whitespace=strips or drops or hidden,
        stripping_tokens=tuple(token["content"] for token in stripping),
        normalize=normalize,
    )


def _leaves(component: Parts | None, inner: str) -> Iterator[Parts]:
    """Yield a component or, if it is a sequence, its elements."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for part in component[inner]:
        yield from _leaves(part, inner)


def _shrink_of(part: Parts) -> int | None:
    """Return how many bytes a normalizer shrinks to at least one, whitespace apart; 0: no limit; None: unknown."""
    kind = part["type"]
    if kind in SHRINK:
        return SHRINK[kind]
    if kind in _GROWING or kind == "Strip":
        return 1
    if kind in _BY_CHARACTER:
        return 0
    if kind != "Replace":
        return None
    old, new = part["pattern"].get("String"), part["content"]
    if not old or not new:
        return None
    return _quotient(len(old.encode()), len(new.encode()))


def _is_local(part: Parts) -> bool:
    if part["type"] == "Replace":
        # a slice may cut a longer pattern in two; a longer replacement would exceed the margin
        return len(part["pattern"].get("String", "")) == 1 and len(part["content"].encode()) <= MAX_UTF8_BYTES
    return part["type"] in _BY_CHARACTER or part["type"] in _GROWING or part["type"] == "Strip"


def _is_counted(part: Parts) -> bool:
    """Return whether the pre-tokenizer drops nothing but whitespace."""
    kind = part["type"]
    if kind in _MAY_DROP:
        return bool(part["behavior"] != "Removed")
    return kind in _DROPS_WHITESPACE or kind in _DROPS_NOTHING


def _longest_token_bytes(parts: Parts, normalize: Callable[[str], str]) -> int:
    """Return how many bytes of a text a token covers at most; 0 if there is no limit."""
    model = parts["model"]
    kind = model.get("type")
    vocabulary = model["vocab"]
    names = [entry[0] for entry in vocabulary] if kind == "Unigram" else list(vocabulary)
    components = (*_leaves(parts["pre_tokenizer"], "pretokenizers"), *_leaves(parts["normalizer"], "normalizers"))
    by_byte = any(part["type"] == "ByteLevel" for part in components)
    if by_byte:
        sizes = [len(name) for name in names]  # one character per byte
        has_all = all(char in vocabulary for char in byte_alphabet()) if kind == "BPE" else False
    else:
        sizes = [len(name.encode("utf-8", "surrogatepass")) for name in names]
        known = set(names)
        has_all = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in known for byte in range(256))
    if kind not in ("BPE", "Unigram") or model.get("dropout"):
        return 0
    unknown = 1
    if not has_all:
        # Unigram always fuses unknown characters; BPE drops them if it has no token for them
        if kind == "Unigram" or model.get("fuse_unk") or model.get("unk_token") is None:
            return 0
        unknown = MAX_UTF8_BYTES
    added = [token["content"] for token in parts["added_tokens"]]
    added_sizes = [len(text.encode()) for content in added for text in (content, normalize(content))]
    return max((unknown, *sizes, *added_sizes))


def _quotient(number: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-number // divisor)


def _slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), SLICE_CHARACTERS):
        yield text[start : start + SLICE_CHARACTERS]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _size_without_whitespace(text: str) -> int:
    return _size("".join(text.split()))
