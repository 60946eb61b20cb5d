"""Decoding, compared with the tokenizers library's own."""

from __future__ import annotations

import random
from pathlib import Path

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from quipu.actors.detokenizer.decoder import WindowDecoder
from quipu.actors.shared.tokenizers_library import Library
from tests.actors.tokenizer.tokenizer_kinds import byte_tokens, save
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

TINY_VOCABULARY = Vocabulary(TINY)


def decode(token_ids: list[int], *, skip: bool = True) -> str:
    decoder = TINY_VOCABULARY.decoder.make_decoder(skip_special_tokens=skip, prompt_tail=())
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


@given(st.text(max_size=200))
def test_round_trip(text: str) -> None:
    """Any text that is encoded and decoded token by token is unchanged."""
    assert decode(TINY_VOCABULARY.encode(text), skip=False) == text


@given(st.lists(st.integers(0, 4095), max_size=60))
def test_byte_table_decodes_like_the_library(token_ids: list[int]) -> None:
    """Any ids decode to what the library returns, even if characters are broken."""
    assert decode(token_ids) == TINY_VOCABULARY.tokenizer.decode(token_ids, skip_special_tokens=True)


def test_no_partial_characters() -> None:
    """A character that spans tokens is returned with the token that completes it."""
    token_ids = TINY_VOCABULARY.encode("🦙")
    assert len(token_ids) > 1
    decoder = TINY_VOCABULARY.decoder.make_decoder(skip_special_tokens=True, prompt_tail=())
    pieces = [decoder.push(token_id) for token_id in token_ids]
    assert "".join(pieces) == "🦙"
    assert pieces[:-1] == [""] * (len(token_ids) - 1)


def test_skip_special_tokens() -> None:
    """`skip_special_tokens` decides whether an end marker is text."""
    ids = TINY_VOCABULARY.encode("<|im_end|>")
    assert len(ids) == 1
    assert decode(ids) == ""
    assert decode(ids, skip=False) == "<|im_end|>"


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Return a tokenizer whose tokens carry their spaces, with byte fallback (as in Llama 2)."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "wor", "ld", "!", "▁a"]
    model = tokenizers.models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_window_decoder_keeps_spaces_and_bytes() -> None:
    """If tokens depend on their neighbours, the pieces add up to what decoding all tokens at once returns."""
    tokenizer = sentencepiece_like()
    chance = random.Random(4)
    hello, bytes_of_llama = tokenizer.token_to_id("▁hello"), [1 + byte for byte in "🦙".encode()]
    for _ in range(200):
        words = [chance.choice([258, 259, 260, 261, 262, 263]) for _ in range(chance.randrange(1, 12))]
        ids = words[:3] + bytes_of_llama + words[3:]
        decoder = WindowDecoder(Library(tokenizer), [hello], skip_special_tokens=True)
        pieces = [decoder.push(token_id) for token_id in ids]
        text = "".join(pieces) + decoder.flush()
        assert "hello" + text == tokenizer.decode([hello, *ids])


SENTENCEPIECE = Library(sentencepiece_like())
BYTES_OF_CHARACTERS = st.text(alphabet="€é🦙\u200d\ufe0f漢", max_size=9)
HELLO, WORLD = 258, 259


def bytes_of(text: str) -> list[int]:
    return [1 + byte for byte in text.encode()]


def decode_after(prompt: list[int], token_ids: list[int]) -> str:
    decoder = WindowDecoder(SENTENCEPIECE, prompt, skip_special_tokens=True)
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


@given(st.sampled_from(["", "hello"]), BYTES_OF_CHARACTERS, BYTES_OF_CHARACTERS)
def test_long_runs_of_bytes(word: str, before: str, text: str) -> None:
    """Characters that are written in bytes are whole however many follow each other, also after others of a prompt."""
    prompt = [HELLO] * bool(word) + bytes_of(before)
    expected = text + (" world" if word or before or text else "world")
    assert decode_after(prompt, [*bytes_of(text), WORLD]) == expected


@given(BYTES_OF_CHARACTERS, st.sampled_from([[], [WORLD]]))
def test_cut_character_after_others(text: str, rest: list[int]) -> None:
    """A character that is cut does not bring replacement characters for those before it."""
    expected = text + "\ufffd\ufffd" + " world" * len(rest)
    assert decode_after([HELLO], [*bytes_of(text), *bytes_of("€")[:2], *rest]) == expected


START = 264
UNITS = st.sampled_from([[258], [259], [260], [257], [263], [START], *map(bytes_of, "€é🦙\n")])
WHOLE = st.lists(UNITS, max_size=14).map(lambda units: [token_id for unit in units for token_id in unit])


@given(WHOLE, WHOLE, st.booleans())
@example([], [START, *bytes_of("€"), HELLO], True)
def test_window_decodes_like_the_library(prompt: list[int], token_ids: list[int], skip: bool) -> None:
    """Whole characters, words and special tokens in any order give what the library returns for all of them."""
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(["<s>"])
    assert tokenizer.token_to_id("<s>") == START
    decoder = WindowDecoder(Library(tokenizer), prompt[-WindowDecoder.WINDOW :], skip_special_tokens=skip)
    text = "".join(map(decoder.push, token_ids)) + decoder.flush()
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert before + text == tokenizer.decode([*prompt, *token_ids], skip_special_tokens=skip)


@given(st.text(max_size=100))
def test_bytes_of_tokens_are_the_text(text: str) -> None:
    """The bytes of the tokens add up to the text; each token's text is its bytes decoded."""
    texts = [TINY_VOCABULARY.decoder.token_text(token_id) for token_id in TINY_VOCABULARY.encode(text)]
    assert b"".join(one.utf8 for one in texts) == text.encode()
    for one in texts:
        assert one.text == one.utf8.decode("utf-8", "replace")


def test_id_without_a_token() -> None:
    """A model's head may have more rows than the vocabulary: such an id has an empty text."""
    assert (
        TINY_VOCABULARY.decoder.token_text(10**6).text == "" and TINY_VOCABULARY.decoder.token_text(10**6).utf8 == b""
    )


def test_byte_tokens(tmp_path: Path) -> None:
    """A token that names a byte is that byte; any other is what the library decodes it to."""
    save(byte_tokens(), tmp_path, "")
    vocabulary = Vocabulary(tmp_path)
    assert vocabulary.decoder.token_text(3 + 0xC3).utf8 == b"\xc3"
    assert vocabulary.decoder.token_text(3 + 0x41).text == "A"
    assert vocabulary.decoder.token_text(261).utf8 == b"wor"
    assert vocabulary.decoder.token_text(1).text == "<s>"
    assert vocabulary.decoder.token_text(10**6).text == ""
