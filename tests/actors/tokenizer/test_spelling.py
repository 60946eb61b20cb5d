"""Tokens by themselves, and prompts given back with the place of each token in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from quipu.actors.messages.prompts import PromptText
from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.tokenizer.encoder import EncodedText, decode_prompt
from tests.vocabularies import Vocabulary

VOCABULARY = Vocabulary(DEMO)


def read_back(token_ids: list[int], *, skip_special_tokens: bool) -> PromptText:
    decoder = VOCABULARY.decoder.make_decoder(skip_special_tokens=skip_special_tokens, prompt_tail=())
    return decode_prompt(token_ids, decoder)


def encode_for_echo(vocabulary: Vocabulary, text: str) -> EncodedText:
    encoded = vocabulary.encoder.encode_text(text, max_tokens=1000, with_echo=True)
    assert isinstance(encoded, EncodedText)
    return encoded


@given(st.text(min_size=1, max_size=200))
@example("two words, wörds ✓ 🦙🦙")
def test_a_text_s_offsets(text: str) -> None:
    """A text comes back as it was sent, each token at the end of those before it, as decoding them one by one says."""
    encoded = encode_for_echo(VOCABULARY, text)
    assert encoded.token_ids == VOCABULARY.encode(text)
    assert encoded.echo is not None and encoded.echo.text == text
    assert encoded.echo == read_back(encoded.token_ids, skip_special_tokens=False)


def test_no_text() -> None:
    """Nothing has nothing to give back."""
    assert encode_for_echo(VOCABULARY, "").echo is None


def test_special_tokens_of_a_prompt_of_ids() -> None:
    """They are hidden or shown as the client wants them; a text that spells one keeps it."""
    text = "<|im_start|>a"
    token_ids = VOCABULARY.encode(text)
    assert len(token_ids) == 2
    assert read_back(token_ids, skip_special_tokens=True).text == "a"
    assert read_back(token_ids, skip_special_tokens=True).offsets == (0, 0)
    assert read_back(token_ids, skip_special_tokens=False).offsets == (0, 12)
    echo = encode_for_echo(VOCABULARY, text).echo
    assert echo is not None and echo.text == text


@given(st.text(max_size=100))
def test_bytes_of_tokens_are_the_text(text: str) -> None:
    """The tokens' bytes, joined, are the text's; a whole character's text is its own."""
    spelled = [VOCABULARY.decoder.token_text(token_id) for token_id in VOCABULARY.encode(text)]
    assert b"".join(one.utf8 for one in spelled) == text.encode()
    for one in spelled:
        assert one.text == one.utf8.decode("utf-8", "replace")


def test_ids_without_a_token() -> None:
    """A model's head may have more rows than its vocabulary: such an id is spelled with nothing."""
    assert VOCABULARY.decoder.token_text(10**6).text == "" and VOCABULARY.decoder.token_text(10**6).utf8 == b""


def sentencepiece_like(folder: Path) -> Vocabulary:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "wor", "ld"]
    model = tokenizers.models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    shutil.copy(DEMO / "config.json", folder)
    return Vocabulary(folder)


def test_vocabularies_with_byte_tokens(tmp_path: Path) -> None:
    """A token that names a byte is that byte; any other is what the library decodes it to."""
    vocabulary = sentencepiece_like(tmp_path)
    assert vocabulary.decoder.token_text(3 + 0xC3).utf8 == b"\xc3"
    assert vocabulary.decoder.token_text(3 + 0x41).text == "A"
    assert vocabulary.decoder.token_text(261).utf8 == b"wor"
    assert vocabulary.decoder.token_text(1).text == "<s>"
    assert vocabulary.decoder.token_text(10**6).text == ""


def test_added_tokens_lie_between(tmp_path: Path) -> None:
    """What the tokenizer puts before and after a text takes no room in it, and the offsets never go back."""
    echo = encode_for_echo(sentencepiece_like(tmp_path), "éa").echo
    assert echo is not None and echo.text == "éa"
    assert echo.first_token_id == 1
    assert echo.offsets == (0, 0, 0, 1, 2)
