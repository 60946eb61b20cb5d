"""How many tokens a text has at least, told without tokenising it: so what cannot fit is refused at once.

Used by `vocabulary.py`. A token stands for no more bytes than the longest one of the vocabulary has, so a text has at
least as many tokens as its bytes divided by that: its bytes as the normalizer leaves them, less the blanks that an
added token or the pre-tokenizer may swallow.

What must always hold: the number is never above what counting gives. Where a component is not known, or where unknown
characters are fused into one token or dropped, there is no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import attrs

Parts = Mapping[str, Any]
"""A tokenizer as its JSON has it, or a component of one."""

SLICE_CHARACTERS = 1 << 16
"""A long text is looked at in slices of this length: normalizers hold the interpreter lock."""
SLICE_MARGIN_BYTES = 256
"""By how much a slice by itself may come out longer than in its text: a character that its neighbours complete."""
MAX_UTF8_BYTES = 4

SHRINK = {"NFC": 4, "NFD": 3, "NFKC": 4, "NFKD": 4}
"""To what part of its bytes each may shrink a text: seven bytes become the two of U+0390, a mathematical digit one.
Those of plain ASCII stay as they are."""
_GROWING = frozenset({"Prepend", "ByteLevel"})
"""Normalizers that take nothing away."""
_BY_CHARACTER = frozenset({*SHRINK, "Lowercase", "StripAccents", "BertNormalizer", "Nmt", "Precompiled"})
"""Normalizers that look at a character and its closest neighbours."""
_KEEPS_ASCII = frozenset({*SHRINK, *_GROWING, "Lowercase", "Strip"})
"""Those that leave plain ASCII as it is, blanks aside."""
_DROPS_BLANKS = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})
_DROPS_NOTHING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_DROPS_IF_TOLD = frozenset({"Split", "Punctuation"})


@attrs.frozen
class TextBound:
    """What one tokenizer's vocabulary and components say of any text."""

    longest_token_bytes: int
    """0: there is no bound."""
    shrink: int
    """The normalizer leaves at least one byte of so many; 0: that is not known."""
    is_ascii_kept: bool
    """It takes nothing away from plain ASCII."""
    is_local: bool
    """It works on each character and its closest neighbours, so that a text can be normalised in slices."""
    swallows_blanks: bool
    """The normalizer or the pre-tokenizer may, anywhere."""
    swallowing: tuple[str, ...]
    """Added tokens that take the blanks beside them, where one stands in the text."""
    normalize: Callable[[str], str] = attrs.field(repr=False, eq=False)

    def most_characters(self, enough: int) -> int | None:
        """The length from which on every text has at least `enough` tokens; None: there is none."""
        if not self.longest_token_bytes or not self.shrink or self.swallows_blanks or self.swallowing:
            return None
        return (enough - 1) * self.longest_token_bytes * self.shrink + 1

    def tokens_of_length(self, num_characters: int) -> int:
        """Tokens that every text of this length has at least; only where `most_characters` is known."""
        return _quotient(_quotient(num_characters, self.shrink), self.longest_token_bytes)

    def told_by_length(self, text: str, enough: int) -> int:
        """As `num_tokens`, from the length alone: 0 where that does not reach `enough`. Takes no time."""
        if self.most_characters(enough) is None:
            return 0
        shrink = 1 if self.is_ascii_kept and text.isascii() else self.shrink
        return self._reaching(enough, _quotient(len(text), shrink))

    def num_tokens(self, text: str, enough: int) -> int:
        """How many tokens `text` has at least, or 0 where fewer than `enough` can be told.

        Takes time in proportion to the text, in slices that hold the interpreter lock for a few milliseconds each.
        """
        if not self.longest_token_bytes or len(text) * MAX_UTF8_BYTES < enough * self.longest_token_bytes:
            return 0
        take = _sizes[self.swallows_blanks or any(content in text for content in self.swallowing)]
        if self.shrink == 1 or (self.is_ascii_kept and text.isascii()):
            num_bytes = sum(map(take, _slices(text)))
        elif self.is_local:
            num_bytes = sum(max(0, take(self.normalize(piece)) - SLICE_MARGIN_BYTES) for piece in _slices(text))
        elif self.shrink:
            num_bytes = _quotient(sum(map(take, _slices(text))), self.shrink)
        else:
            return 0
        return self._reaching(enough, num_bytes)

    def _reaching(self, enough: int, num_bytes: int) -> int:
        num_tokens = _quotient(num_bytes, self.longest_token_bytes)
        return num_tokens if num_tokens >= enough else 0


def no_bound() -> TextBound:
    """For a tokenizer of which nothing is known."""
    return TextBound(0, 0, False, False, True, (), str)


def find_bound(parts: Parts, normalize: Callable[[str], str]) -> TextBound:
    """What can be told of texts for the tokenizer `parts`; `normalize` is its normalizer."""
    longest = _longest_token_bytes(parts, normalize)
    normalizers = list(_leaves(parts["normalizer"], "normalizers"))
    pre_tokenizers = list(_leaves(parts["pre_tokenizer"], "pretokenizers"))
    shrinks = list(map(_shrink_of, normalizers))
    if not longest or None in shrinks or not all(map(_is_counted, pre_tokenizers)):
        return no_bound()
    strips = any(part["type"] == "Strip" for part in normalizers)
    drops = any(part["type"] in _DROPS_BLANKS for part in pre_tokenizers)
    swallowing = [token for token in parts["added_tokens"] if token["lstrip"] or token["rstrip"]]
    # one that is looked for in the normalised text may stand there and not in the text itself
    hidden = bool(normalizers) and any(token["normalized"] for token in swallowing)
    return TextBound(
        longest_token_bytes=longest,
        shrink=prod(shrink or 0 for shrink in shrinks),
        is_ascii_kept=all(part["type"] in _KEEPS_ASCII for part in normalizers),
        is_local=all(map(_is_local, normalizers)),
        swallows_blanks=strips or drops or hidden,
        swallowing=tuple(token["content"] for token in swallowing),
        normalize=normalize,
    )


def _leaves(component: Parts | None, inner: str) -> Iterator[Parts]:
    """A component, or those that it is a sequence of."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for part in component[inner]:
        yield from _leaves(part, inner)


def _shrink_of(part: Parts) -> int | None:
    """Of how many bytes a normalizer leaves one at least, blanks aside; 0: of any number; None: that is not known."""
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
        # what a cut leaves of a longer one could come to anything; what grows much, beyond the margin
        return len(part["pattern"].get("String", "")) == 1 and len(part["content"].encode()) <= MAX_UTF8_BYTES
    return part["type"] in _BY_CHARACTER or part["type"] in _GROWING or part["type"] == "Strip"


def _is_counted(part: Parts) -> bool:
    """Whether all that a pre-tokenizer is given, blanks aside, reaches the model."""
    kind = part["type"]
    if kind in _DROPS_IF_TOLD:
        return bool(part["behavior"] != "Removed")
    return kind in _DROPS_BLANKS or kind in _DROPS_NOTHING


def _longest_token_bytes(parts: Parts, normalize: Callable[[str], str]) -> int:
    """Bytes of a text that a token stands for at most; 0 where one may stand for any number of them."""
    model = parts["model"]
    kind = model.get("type")
    vocabulary = model["vocab"]
    names = [entry[0] for entry in vocabulary] if kind == "Unigram" else list(vocabulary)
    components = (*_leaves(parts["pre_tokenizer"], "pretokenizers"), *_leaves(parts["normalizer"], "normalizers"))
    by_byte = any(part["type"] == "ByteLevel" for part in components)
    if by_byte:
        sizes = [len(name) for name in names]  # a character a byte
        has_all = all(char in vocabulary for char in byte_alphabet()) if kind == "BPE" else False
    else:
        sizes = [len(name.encode("utf-8", "surrogatepass")) for name in names]
        known = set(names)
        has_all = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in known for byte in range(256))
    if kind not in ("BPE", "Unigram") or model.get("dropout"):
        return 0
    unknown = 1
    if not has_all:
        # Unigram always fuses; without a token for them, BPE drops what it does not know
        if kind == "Unigram" or model.get("fuse_unk") or model.get("unk_token") is None:
            return 0
        unknown = MAX_UTF8_BYTES
    added = [token["content"] for token in parts["added_tokens"]]
    added_sizes = [len(text.encode()) for content in added for text in (content, normalize(content))]
    return max((unknown, *sizes, *added_sizes))


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: printable ones for themselves, the others
    from U+0100 on (the mapping that GPT-2 introduced)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _quotient(number: int, divisor: int) -> int:
    """Rounded up."""
    return -(-number // divisor)


def _slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), SLICE_CHARACTERS):
        yield text[start : start + SLICE_CHARACTERS]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _size_without_blanks(text: str) -> int:
    return _size("".join(text.split()))


_sizes = {False: _size, True: _size_without_blanks}
