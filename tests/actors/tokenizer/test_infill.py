"""Prompts with a gap: the formats of models, the tokens around the texts, and the texts' own."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from quipu.actors.messages.prompts import InfillPrompt
from quipu.actors.shared.token_decoding import byte_alphabet
from quipu.actors.shared.tokenizers_library import Library
from quipu.actors.tokenizer.encoder import TextEncoder, TooManyTokens, load_encoder
from quipu.actors.tokenizer.infill import encode_infill
from tests.actors.tokenizer.tokenizer_kinds import llama_2_like, plain

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>")
GLM = ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")
CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>")
CODESTRAL = ("[PREFIX]", "[SUFFIX]")


def encoder_of(*contents: str) -> TextEncoder:
    """Load an encoder of bytes that puts two tokens around each text and has these added tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>", *contents])
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return load_encoder(Library.load(tokenizer.to_str().encode()))


def encode(encoder: TextEncoder, prefix: str, suffix: str, max_tokens: int = 1000) -> list[int] | TooManyTokens:
    assert encoder.infill is not None
    return encode_infill(encoder, encoder.infill, InfillPrompt(prefix, suffix, "suffix"), max_tokens=max_tokens)


def names(encoder: TextEncoder, ids: list[int] | TooManyTokens) -> list[str]:
    assert isinstance(ids, list) and isinstance(encoder.backend, Library)
    return [encoder.backend.name_of(token_id) or "" for token_id in ids]


@pytest.mark.parametrize("tokens", [QWEN, STARCODER, DEEPSEEK, GLM, CODE_LLAMA, CODESTRAL])
def test_formats(tokens: tuple[str, ...]) -> None:
    """Each model's tokens stand where it expects them, after what the tokenizer puts before a text; a tokenizer that
    lacks one of them has none.
    """
    encoder = encoder_of("<other>", *tokens)
    prefix, suffix, *middle = tokens
    expected = ["<s>", prefix, "a", "b", suffix, "c", *middle]
    if not middle:
        expected = ["<s>", suffix, "c", prefix, "a", "b"]
    assert names(encoder, encode(encoder, "ab", "c")) == expected
    assert names(encoder, encode(encoder, "", "")) == [name for name in expected if name not in ("a", "b", "c")]
    for missing in tokens:
        assert encoder_of(*(token for token in tokens if token != missing)).infill is None


def test_texts_that_spell_tokens() -> None:
    """They are encoded as in any other prompt."""
    encoder = encoder_of(*QWEN)
    text = f"a{QWEN[2]}<|fim_"
    found = encode(encoder, text, text)
    assert isinstance(found, list)
    alone = encoder.encode_part(text, max_tokens=100)
    assert isinstance(alone, list) and found[2 : 2 + len(alone)] == found[3 + len(alone) : -1] == alone


def test_suffix_goes_on() -> None:
    """Where a tokenizer begins a text with a space, Code Llama's suffix has none, and its prefix has one."""
    tokenizer = llama_2_like()
    tokenizer.add_special_tokens(plain(*CODE_LLAMA))
    encoder = load_encoder(Library.load(tokenizer.to_str().encode()))
    told = names(encoder, encode(encoder, "kept", "kept"))
    at = told.index("▁<SUF>")
    assert told[:2] == ["<unk>", "▁<PRE>"] and told[-1] == "▁<MID>"
    assert "".join(told[2:at]) == "▁kept" and "".join(told[at + 1 : -1]) == "kept"


def test_too_many_tokens() -> None:
    """What does not fit is refused: with its exact number of tokens, unless the text before the gap is too long."""
    for tokens, num_tokens in ((QWEN, 4 + 5 + 6), (CODE_LLAMA, 4 + 5 + 6), (CODESTRAL, 3 + 5 + 6)):
        encoder = encoder_of(*tokens)
        found = encode(encoder, "12345", "123456", num_tokens)
        assert isinstance(found, list) and len(found) == num_tokens
        assert encode(encoder, "12345", "123456", num_tokens - 1) == TooManyTokens(num_tokens, is_exact=True)
        long = encode(encoder, "12345", "123456", 7)
        assert long == TooManyTokens(num_tokens - 6, is_exact=False)
