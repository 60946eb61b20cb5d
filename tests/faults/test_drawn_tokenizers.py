"""Whatever the files of a tokenizer contain, they are read or refused by name; nothing else is raised.

A small tokenizer's parts are replaced by others, of any type, at any depth, and so are entries of the files beside it.
"""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.detokenizer.decoder import Decoder
from quipu.actors.detokenizer.output_format import choose_format
from quipu.actors.grammars.grammar_library import load_grammars
from quipu.actors.shared.checkpoint import CheckpointError, read_info
from quipu.actors.shared.tokenizers_library import LibraryPanic, load_library
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.tokenizer.encoder import load_encoder
from quipu.actors.tokenizer.template_source import read_template
from quipu.web.cli.generation_config import read_sampling_defaults

REGEX = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\s+"}, "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3}, "merges": [["a", "b"]],
}  # fmt: skip
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["▁", -2.0]], "byte_fallback": False}
WORDS = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
BASE = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [{"id": 4, "content": "<s>", **ADDED}, {"id": 5, "content": "<|im_end|>", **ADDED}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "a"}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [REGEX, LEVEL]},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}},
    },
    "decoder": LEVEL, "model": BPE,
}  # fmt: skip
CONFIG = {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 1}

JUNK = st.one_of(
    st.sampled_from([None, True, False, -1, 0, 1, 7, 2**31, 2**63, 2**64, 10**30, 0.5, -1e308, float("nan")]),
    st.sampled_from(["", "a", "<s>", "\u2581", "\ud800", "\0", "(a+)+$", "(?P<x>", "[", "\\p{L}", "x" * 300, "{% if"]),
    st.sampled_from([[], {}, [[]], [{}], ["a"], {"content": "a"}, {"type": "NFC"}, {"content": "", "lstrip": 1}]),
    st.sampled_from([LEVEL, REGEX, UNIGRAM, {**WORDS, "vocab": {"a": 0, "##b": 1}}, {"type": "Lowercase"}]),
    st.sampled_from([{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}]),
    st.sampled_from(
        [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Precompiled", "precompiled_charsmap": "AA"}]
    ),
    st.sampled_from([{"type": "Replace", "pattern": {"Regex": "(a|a)*$"}, "content": "b"}]),
)
ENTRIES = st.dictionaries(
    st.sampled_from(
        [
            *(
                "eos_token",
                "bos_token",
                "pad_token",
                "image_token",
                "extra_special_tokens",
                "additional_special_tokens",
            ),
            *("added_tokens_decoder", "chat_template", "split_special_tokens", "fast_tokenizer_files", "x"),
            *("response_template", "model_max_length", "clean_up_tokenization_spaces", "tokenizer_class"),
        ]
    ),
    JUNK | st.dictionaries(st.sampled_from(["0", "5", "-1", "٣", "a", "9" * 99]), JUNK, max_size=2),
    max_size=3,
)
GENERATION = st.dictionaries(
    st.sampled_from(["eos_token_id", "temperature", "top_k", "suppress_tokens", "num_beams", "min_length"]),
    JUNK,
    max_size=2,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(*path, key), *places(inner, (*path, key))]]


@st.composite
def drawn_tokenizer(draw: st.DrawFn) -> Any:
    drawn: Any = copy.deepcopy(BASE)
    drawn["model"] = copy.deepcopy(draw(st.sampled_from([BPE, BPE, UNIGRAM])))
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(places(drawn)))
        parent = drawn
        for key in path:
            parent = parent[key]
        if draw(st.booleans()) or isinstance(parent, list):
            parent[last] = copy.deepcopy(draw(JUNK))
        else:
            del parent[last]
    return drawn


FILES = st.fixed_dictionaries(
    {"tokenizer.json": drawn_tokenizer()},
    optional={
        "tokenizer_config.json": ENTRIES,
        "special_tokens_map.json": ENTRIES,
        "added_tokens.json": st.dictionaries(st.sampled_from(["<s>", "", "a", "new"]), JUNK, max_size=2) | JUNK,
        "generation_config.json": GENERATION,
        "chat_template.json": ENTRIES | JUNK,
    },
)


def read_all(folder: Path) -> None:
    """Read everything that serving reads of a tokenizer, and use it."""
    info = read_info(folder)
    read_sampling_defaults("auto", folder, info.vocab_size)
    library = load_library(folder)
    encoder = load_encoder(library)
    template = read_template(folder)
    choose_format(folder, library, template and template.text, "auto", "auto")
    InlineRenderer(template)
    load_grammars(library.source, (1,))
    Decoder(library)
    with suppress(LibraryPanic):  # the error of one request
        encoder.encode_text("ab <s> ab", max_tokens=99)


@pytest.mark.timeout(900)  # for thousands of examples
@given(files=FILES, data=st.data())
def test_drawn_files(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Any], data: st.DataObject) -> None:
    """Drawn files, some with a changed byte, are read or refused with a short message that names a file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in {"config.json": CONFIG, **files}.items():
        packed = bytearray(json.dumps(content).encode())
        if name != "config.json" and data.draw(st.integers(0, 9)) == 0:
            packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
        (folder / name).write_bytes(packed)
    try:
        read_all(folder)
    except CheckpointError as error:
        assert ".json" in str(error) or "chat template" in str(error)
        assert len(str(error)) < 2000
