"""Which tokens end a turn: all that any of a checkpoint's files names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.shared.checkpoint import CheckpointError, read_info

BPE = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {"vocab": {"a": 0, "</s>": 2}}}
UNIGRAM = {"added_tokens": [], "model": {"vocab": [["<pad>", 0.0], ["</s>", 0.0], ["a", -1.5]]}}


def ends(folder: Path, tokenizer_config: Any, tokenizer: Any = BPE, **more: Any) -> tuple[int, ...]:
    """Return the end tokens of a checkpoint whose other files name 1 and 3; `more` are further files, by name."""
    config = {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 1}
    files = {"config": config, "generation_config": {"eos_token_id": [1, 3]}, "tokenizer": tokenizer, **more}
    for name, content in {**files, "tokenizer_config": tokenizer_config}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_info(folder).eos_token_ids


@pytest.mark.parametrize(
    ("named", "tokenizer", "found"),
    [
        ({"eos_token": "<|im_end|>"}, BPE, (1, 3, 7)),
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False}}, BPE, (1, 3, 7)),
        ({"eos_token": "</s>"}, BPE, (1, 3, 2)),
        ({"eos_token": "</s>"}, UNIGRAM, (1, 3)),
        ({"eos_token": "a"}, UNIGRAM, (1, 3, 2)),
        ({"eos_token": "x", "added_tokens_decoder": {"5": {"content": "x"}}}, BPE, (1, 3, 5)),
        ({"eos_token": "x", "added_tokens_decoder": {"50": {"content": "x"}}}, BPE, (1, 3)),
        ({"eos_token": "x", "added_tokens_decoder": {"5" * 5000: {"content": "x"}}}, BPE, (1, 3)),
        ({"eos_token": "x", "added_tokens_decoder": {"\u0663": {"content": "x"}}}, BPE, (1, 3)),
        ({"eos_token": "no such token"}, BPE, (1, 3)),
        ({"eos_token": None}, BPE, (1, 3)),
        ({"eos_token": ["</s>"]}, {"added_tokens": 3, "model": []}, (1, 3)),
        ({"eos_token": "</s>", "added_tokens_decoder": [1]}, {"added_tokens": [7], "model": {"vocab": 3}}, (1, 3)),
    ],
)
def test_union_of_ends(named: Any, tokenizer: Any, found: tuple[int, ...], tmp_path: Path) -> None:
    """The tokenizer's own end token counts beside those of the configurations; a name without a token does not."""
    assert ends(tmp_path, named, tokenizer) == found


def test_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    """A file that cannot be read is an error with its name."""
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json does not contain a JSON object"):
        ends(tmp_path, [])


@pytest.mark.parametrize(
    ("tokenizer_config", "special", "found"),
    [
        ({}, {"eos_token": "<|im_end|>"}, (1, 3, 7)),
        ({}, {"eos_token": {"content": "</s>", "lstrip": False}}, (1, 3, 2)),
        ({"eos_token": "</s>"}, {"eos_token": "<|im_end|>"}, (1, 3, 2, 7)),
        ({"added_tokens_decoder": {"5": {"content": "x"}}}, {"eos_token": "x"}, (1, 3, 5)),
        ({}, {"eos_token": 7}, (1, 3)),
    ],
)
def test_special_tokens_map(tokenizer_config: Any, special: Any, found: tuple[int, ...], tmp_path: Path) -> None:
    """An end token named in special_tokens_map.json counts, too."""
    assert ends(tmp_path, tokenizer_config, special_tokens_map=special) == found


def test_broken_special_tokens_map_is_named(tmp_path: Path) -> None:
    """A file that cannot be read is an error with its name."""
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json does not contain a JSON object"):
        ends(tmp_path, {}, special_tokens_map=[])


def test_nested_configuration(tmp_path: Path) -> None:
    """End tokens in the part of config.json that describes the language model count, too."""
    config: dict[str, Any] = {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 1}
    assert ends(tmp_path, {}, config={**config, "text_config": {"eos_token_id": [4, 5]}}) == (1, 4, 5, 3)
    assert ends(tmp_path, {}, config={**config, "text_config": 4}) == (1, 3)
    with pytest.raises(CheckpointError, match=r"config\.json: text_config\.eos_token_id must be a token id or a list"):
        ends(tmp_path, {}, config={**config, "text_config": {"eos_token_id": "4"}})


def test_ends_that_cannot_be_drawn(tmp_path: Path) -> None:
    """An end outside the vocabulary is none, wherever it is named: a grammar library refuses a tokenizer with such."""
    config = {
        "vocab_size": 9,
        "max_position_embeddings": 64,
        "eos_token_id": [-1, 8],
        "text_config": {"eos_token_id": 9},
    }
    generation = {"eos_token_id": [2, 1 << 30]}
    assert ends(tmp_path, {"eos_token": "a"}, config=config, generation_config=generation) == (8, 2, 0)
