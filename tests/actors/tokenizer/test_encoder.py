"""Encoding for an echo: the prompt with the offset of each token."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from quipu.actors.messages.prompts import PromptText
from quipu.actors.tokenizer.encoder import EncodedText
from quipu.actors.tokenizer.prompt_decoding import decode_prompt
from tests.actors.tokenizer.tokenizer_kinds import byte_tokens, save
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

VOCABULARY = Vocabulary(TINY)


def decoded(token_ids: list[int], *, skip_special_tokens: bool) -> PromptText:
    decoder = VOCABULARY.decoder.make_decoder(skip_special_tokens=skip_special_tokens, prompt_tail=())
    return decode_prompt(token_ids, decoder)


def vocabulary_of(tokenizer: tokenizers.Tokenizer, folder: Path) -> Vocabulary:
    save(tokenizer, folder, "")
    return Vocabulary(folder)


def encode_for_echo(vocabulary: Vocabulary, text: str) -> EncodedText:
    encoded = vocabulary.encoder.encode_text(text, max_tokens=1000, with_echo=True)
    assert isinstance(encoded, EncodedText)
    return encoded


@given(st.text(min_size=1, max_size=200))
@example("two words, wörds ✓ 🦙🦙")
def test_offsets_of_a_text(text: str) -> None:
    """A text is echoed unchanged, with the offsets that decoding it token by token gives."""
    encoded = encode_for_echo(VOCABULARY, text)
    assert encoded.token_ids == VOCABULARY.encode(text)
    assert encoded.echo is not None and encoded.echo.text == text
    assert encoded.echo == decoded(encoded.token_ids, skip_special_tokens=False)


def test_empty_text() -> None:
    """An empty text has no echo."""
    assert encode_for_echo(VOCABULARY, "").echo is None


def test_special_tokens_in_a_prompt_of_ids() -> None:
    """Special tokens in a prompt of ids are hidden or shown as requested; in a text prompt they are always shown."""
    text = "<|im_start|>a"
    token_ids = VOCABULARY.encode(text)
    assert len(token_ids) == 2
    assert decoded(token_ids, skip_special_tokens=True).text == "a"
    assert decoded(token_ids, skip_special_tokens=True).offsets == (0, 0)
    assert decoded(token_ids, skip_special_tokens=False).offsets == (0, 12)
    echo = encode_for_echo(VOCABULARY, text).echo
    assert echo is not None and echo.text == text


def test_tokens_that_the_tokenizer_adds(tmp_path: Path) -> None:
    """Tokens added before and after a text take up no characters, and offsets never decrease."""
    echo = encode_for_echo(vocabulary_of(byte_tokens(), tmp_path), "éa").echo
    assert echo is not None and echo.text == "éa"
    assert echo.first_token_id == 1
    assert echo.offsets == (0, 0, 0, 1, 2)
