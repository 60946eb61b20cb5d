"""Tokenizers and chat templates, against the library's own decoding and transformers' rendering."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quipu.actors.detokenizer.decoder import WindowDecoder
from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.shared.checkpoint import DEMO, CheckpointError, read_info, resolve
from quipu.actors.shared.tokenizers_library import Library
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.tokenizer.chat_template import TemplateError
from tests.chats import encode_chat
from tests.vocabularies import Vocabulary

DEMO_VOCABULARY = Vocabulary(DEMO)
MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a quipu? ünïcödé ✓"},
    {"role": "assistant", "content": "A knotted cord."},
    {"role": "user", "content": "Why?"},
)


def decode(token_ids: list[int], *, skip: bool = True) -> str:
    decoder = DEMO_VOCABULARY.decoder.make_decoder(skip_special_tokens=skip, prompt_tail=())
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


@given(st.text(max_size=200))
def test_text_comes_back(text: str) -> None:
    """Any text, encoded and decoded token by token, is itself."""
    assert decode(DEMO_VOCABULARY.encode(text), skip=False) == text


@given(st.lists(st.integers(0, 4095), max_size=60))
def test_byte_table_decodes_like_the_library(token_ids: list[int]) -> None:
    """Any ids decode to what the tokenizers library makes of them, broken characters included."""
    assert decode(token_ids) == DEMO_VOCABULARY.tokenizer.decode(token_ids, skip_special_tokens=True)


def test_nothing_half_is_handed_out() -> None:
    """A character that spans tokens comes whole, with the token that completes it."""
    token_ids = DEMO_VOCABULARY.encode("🦙")
    assert len(token_ids) > 1
    decoder = DEMO_VOCABULARY.decoder.make_decoder(skip_special_tokens=True, prompt_tail=())
    pieces = [decoder.push(token_id) for token_id in token_ids]
    assert "".join(pieces) == "🦙"
    assert pieces[:-1] == [""] * (len(token_ids) - 1)


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    """`skip_special_tokens` decides whether an end marker is text."""
    ids = DEMO_VOCABULARY.encode("<|im_end|>")
    assert len(ids) == 1
    assert decode(ids) == ""
    assert decode(ids, skip=False) == "<|im_end|>"


def test_chat_template_renders_like_transformers() -> None:
    """The same ids as transformers' `apply_chat_template`."""
    reference = AutoTokenizer.from_pretrained(DEMO)
    for prompt in (True, False):
        expected = reference.apply_chat_template(list(MESSAGES), add_generation_prompt=prompt, return_dict=False)
        assert encode_chat(DEMO_VOCABULARY, ChatPrompt(MESSAGES, prompt)).token_ids == expected


def write_template(folder: Path, template: str | None) -> Vocabulary:
    shutil.copy(DEMO / "tokenizer.json", folder)
    config = {} if template is None else {"chat_template": template, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Vocabulary(folder)


def test_templates_that_refuse(tmp_path: Path) -> None:
    """What a template raises is told to the client; a missing one too; code in one cannot reach Python."""
    chat = ChatPrompt(MESSAGES)
    refusing = write_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        encode_chat(refusing, chat)
    with pytest.raises(TemplateError, match="no chat template"):
        encode_chat(write_template(tmp_path, None), chat)
    escaping = write_template(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError):
        encode_chat(escaping, chat)
    with pytest.raises(CheckpointError, match="does not compile"):
        InlineRenderer(write_template(tmp_path, "{% if %}").template)


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A tokenizer whose pieces carry their spaces and whose unknown characters fall back to bytes (as Llama 2's)."""
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
    """Where pieces depend on their neighbours, the pieces joined are what decoding everything at once gives."""
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


def test_checkpoints_that_cannot_be_read(tmp_path: Path) -> None:
    """Every way in which a folder is no checkpoint has a message with the file or the field."""
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_info(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_info(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        read_info(tmp_path)
    for no_number in ('"x"', "true", "0", "null"):
        (tmp_path / "config.json").write_text(f'{{"vocab_size": {no_number}, "max_position_embeddings": 64}}')
        with pytest.raises(CheckpointError, match=r"^config\.json: vocab_size must be a positive integer, not "):
            read_info(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Vocabulary(tmp_path)
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        resolve("./no/such/folder")
    with pytest.raises(CheckpointError, match="float8"):
        read_info(DEMO, dtype="float8")
    with pytest.raises(CheckpointError, match="could not be fetched from the hub"):
        resolve("nobody/no-such-model")  # the suite runs offline


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    """In either spelling; a length that the config gives is never shortened, and other scalings leave it as it is."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}

    def longest(**entries: object) -> int:
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5, **entries}))
        return read_info(tmp_path).max_model_len

    assert longest(max_position_embeddings=1000, rope_scaling=yarn) == 4000
    assert longest(max_position_embeddings=1000, rope_parameters={**yarn, "rope_type": "yarn"}) == 4000
    assert longest(max_position_embeddings=5000, rope_scaling=yarn) == 5000
    assert longest(max_position_embeddings=1000, rope_scaling={**yarn, "type": "llama3"}) == 1000
    assert longest(max_position_embeddings=1000, rope_scaling=None) == 1000


def test_demo_info() -> None:
    """What the web side reads of the demo checkpoint."""
    info = read_info(resolve("demo"), name="demo")
    config = json.loads((DEMO / "config.json").read_text())
    assert info.max_model_len == config["max_position_embeddings"] >= 8192
    assert info.vocab_size == config["vocab_size"]
    assert DEMO_VOCABULARY.encode("<|im_end|>")[0] in info.eos_token_ids
