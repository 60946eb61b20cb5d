"""The lower bound on a text's tokens never exceeds the real count, whatever the tokenizer."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from quipu.actors.shared.token_decoding import byte_alphabet
from quipu.actors.shared.tokenizers_library import Library
from quipu.actors.tokenizer import text_bound
from quipu.actors.tokenizer.text_bound import SLICE_MARGIN_BYTES, TextBound, find_bound
from tests.actors.tokenizer.tokenizer_kinds import BASES, CORPUS, END, START, TOKENS, make, tiny


def normalizing(*kinds: normalizers.Normalizer) -> Callable[[], Tokenizer]:
    def make_one() -> Tokenizer:
        tokenizer = tiny()
        tokenizer.normalizer = normalizers.Sequence(list(kinds))
        return tokenizer

    return make_one


def dropping(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Callable[[], Tokenizer]:
    def make_one() -> Tokenizer:
        tokenizer = tiny()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel()])
        return tokenizer

    return make_one


def byte_fallback(fuse: bool, complete: bool = True) -> Tokenizer:
    """Return BPE with one token per byte; with none for the first byte of emojis if it is not `complete`."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256) if complete or byte != 0xF0), "ab", "a", "b"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=fuse
    )
    return Tokenizer(model)


def without_unknown() -> Tokenizer:
    """Return BPE that drops unknown characters."""
    return Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))


def stripping(**flags: bool) -> Callable[[], Tokenizer]:
    def make_one() -> Tokenizer:
        tokenizer = tiny()
        tokenizer.add_tokens([AddedToken(START, normalized=False, special=True, **flags)])
        return tokenizer

    return make_one


def single_bytes(*kinds: normalizers.Normalizer, **flags: bool) -> Callable[[], Tokenizer]:
    """Return a tokenizer with as many tokens as bytes, so that the bound has no slack."""

    def make_one() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(byte_alphabet())}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.normalizer = normalizers.Sequence(list(kinds))
        if flags:
            tokenizer.add_tokens([AddedToken("<", normalized=False, special=True, **flags)])
        return tokenizer

    return make_one


def unigram_of_bytes() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁the", -2.0), ("e", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    **{f"{base}, {tokens}": lambda b=base, t=tokens: make(b, t) for base in BASES for tokens in TOKENS},
    "NFKC": normalizing(normalizers.NFKC()),
    "NFD, lower case": normalizing(normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()),
    "strips": normalizing(normalizers.Strip(), normalizers.NFC()),
    "control characters": normalizing(normalizers.Nmt()),
    "bert's": normalizing(normalizers.BertNormalizer()),
    "replaces much": normalizing(normalizers.Replace("aaaa", "b")),
    "replaces a character": normalizing(normalizers.Replace("é", "e"), normalizers.NFKC()),
    "replaces a pattern": normalizing(normalizers.Replace(Regex(r"\s+"), " ")),
    "deletes": normalizing(normalizers.Replace("a", "")),
    "prepends": normalizing(normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")),
    "no whitespace": dropping(pre_tokenizers.WhitespaceSplit()),
    "no punctuation": dropping(pre_tokenizers.Punctuation("removed")),
    "splits away": dropping(pre_tokenizers.Split("a", "removed")),
    "delimiters": dropping(pre_tokenizers.CharDelimiterSplit("a")),
    "strips left": stripping(lstrip=True),
    "strips right": stripping(rstrip=True),
    "bytes": lambda: byte_fallback(False),
    "bytes, fused": lambda: byte_fallback(True),
    "some bytes": lambda: byte_fallback(False, complete=False),
    "some bytes, fused": lambda: byte_fallback(True, complete=False),
    "unknown": without_unknown,
    "single bytes": single_bytes(),
    "single bytes, NFC": single_bytes(normalizers.NFC()),
    "single bytes, NFKC": single_bytes(normalizers.NFKC()),
    "single bytes, lower case": single_bytes(normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()),
    "single bytes, bert's": single_bytes(normalizers.BertNormalizer()),
    "single bytes, replaced": single_bytes(normalizers.Replace("é", "e"), normalizers.NFKC()),
    "single bytes, stripping": single_bytes(lstrip=True),
    "unigram": unigram_of_bytes,
}
BOUND = ("tiny, plain", "qwen, plain", "roberta, plain", "llama 2, plain", "NFKC", "strips", "bytes", "unigram")
"""Kinds used by real models: they must have a bound."""
UNBOUND = ("metaspace first, plain", "bert, plain", "some bytes, fused", "unknown", "splits away", "delimiters")
"""Kinds that fuse or drop unknown characters, or drop more than whitespace."""


@cache
def library_of(kind: str) -> Library:
    return Library(KINDS[kind]())


@cache
def bound_of(kind: str) -> TextBound:
    library = library_of(kind)
    return find_bound(json.loads(library.tokenizer.to_str()), library.normalize)


PARTS = [
    "a",
    "aaaa",
    "é",
    "e\u0301",
    "\u1fbe\u0308\u0301",
    "\u212a",
    "\U0001d7ce",
    "ﷺ",
    " ",
    "\n",
    "  \t",
    "✓",
    "🦙",
    "the",
    "\x00",
]
PARTS += [START, END, "<|im_start|>", "\u0301", "한", "한", ".", "Ünï", "ab", "\u200d", "\u00ad", "\ufeff"]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Repeat a few parts: the kinds of text for which a bound could be wrong."""
    parts = draw(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), min_size=1, max_size=6))
    return "".join(parts) * draw(st.integers(1, 200)) + draw(st.text(max_size=5))


@given(st.sampled_from(list(KINDS)), texts(), st.integers(1, 40))
@settings(max_examples=settings().max_examples * 10)
@example("qwen, plain", "\u1fbe\u0308\u0301" * 100, 2)
@example("NFKC", "\U0001d7ce" * 100, 2)
@example("NFKC", "\U0001d6ca\u0308\u0301" * 100, 2)
@example("strips left", " " * 500 + START, 1)
@example("strips right", START + " " * 500, 1)
@example("strips", " " * 500, 1)
@example("no whitespace", " " * 500, 1)
@example("single bytes, stripping", " " * 50 + "<" + " " * 50, 1)
@example("some bytes, fused", "🦙" * 100, 1)
@example("replaces much", "a" * 400, 2)
def test_bound_is_at_most_the_count(kind: str, text: str, threshold: int) -> None:
    """For every kind of tokenizer, neither the bound by length nor the one by bytes exceeds the count."""
    bound, counted = bound_of(kind), len(library_of(kind).list_ids(text))
    for found in (bound.num_tokens_by_length(text, threshold), bound.num_tokens(text, threshold)):
        assert found == 0 or threshold <= found <= counted
    most = bound.num_characters_for(threshold)
    assert most is None or len(text) < most or counted >= threshold


@given(st.sampled_from(list(KINDS)), texts(), st.integers(1, 5))
@settings(max_examples=settings().max_examples * 3)
@example("single bytes, NFC", "e\u0301" * 100, 1)
@example("single bytes, NFC", "e" + "\u0301\u0323" * 100, 3)
@example("single bytes, NFKC", "\u1fbe\u0308\u0301" * 100, 2)
def test_slices_do_not_raise_the_bound(kind: str, text: str, length: int) -> None:
    """Splitting a text anywhere, even within combined characters, does not raise its bound beyond the margin."""
    bound, counted = bound_of(kind), len(library_of(kind).list_ids(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_bound, "SLICE_CHARACTERS", length)
        assert bound.num_tokens(text, 1) <= counted
        # a split adds far less than the margin
        patch.setattr(text_bound, "SLICE_MARGIN_BYTES", SLICE_MARGIN_BYTES // 8)
        assert bound.num_tokens(text, 1) <= counted


@pytest.mark.parametrize("kind", BOUND)
def test_long_texts_have_a_bound(kind: str) -> None:
    """A text with too many bytes to fit is detected, to within a token or two."""
    bound = bound_of(kind)
    unit = bound.longest_token_bytes
    assert bound.num_tokens("x" * 100 * unit, 100) >= 100
    assert bound.num_tokens("é" * 400 * unit, 50) >= 50
    assert bound.num_tokens("x" * 98 * unit, 100) == 0


@pytest.mark.parametrize("kind", UNBOUND)
def test_kinds_without_a_bound(kind: str) -> None:
    """If any number of characters can become one token or none, there is no bound."""
    bound = bound_of(kind)
    assert bound.longest_token_bytes == 0
    assert bound.num_tokens("x" * 10_000, 1) == bound.num_tokens_by_length("x" * 10_000, 1) == 0


def test_shrinking_by_normal_forms() -> None:
    """No character or composition shrinks by more than the assumed factor."""
    for composed, decomposed in (("NFC", "NFD"), ("NFKC", "NFKD")):
        # for all other characters, their own form and nobody else's, the assertions hold trivially
        changed = [chr(c) for c in range(0x110000) if not unicodedata.is_normalized(decomposed, chr(c))]
        most: dict[str, int] = {}
        for char in changed:
            normal = unicodedata.normalize(decomposed, char)
            if len(normal) == 1:
                most[normal] = max(most.get(normal, len(normal.encode())), len(char.encode()))
        for char in (*changed, *most):
            source = sum(most.get(part, len(part.encode())) for part in unicodedata.normalize(decomposed, char))
            assert len(char.encode()) <= source  # no character is longer than the parts it may come from
            if unicodedata.normalize(composed, char) == char:
                assert source <= len(char.encode()) * text_bound.SHRINK[composed]
        assert all(size <= len(char.encode()) * text_bound.SHRINK[decomposed] for char, size in most.items())


def test_unknown_characters_that_are_not_fused() -> None:
    """A BPE with an unknown token that is not fused has one for each unknown character."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=100, special_tokens=["<unk>"]))
    library = Library(tokenizer)
    bound = find_bound(json.loads(tokenizer.to_str()), library.normalize)
    assert bound.longest_token_bytes >= 4
    for text in ("🦙" * 1000, "A quipu " * 200):
        assert 0 < bound.num_tokens(text, 1) <= len(library.list_ids(text))
