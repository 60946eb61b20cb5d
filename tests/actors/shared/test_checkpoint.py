"""Reading a checkpoint's JSON files, and the errors for checkpoints that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quipu.actors.shared.checkpoint import DEMO, CheckpointError, read_info, resolve
from tests.vocabularies import Vocabulary


def test_invalid_checkpoints(tmp_path: Path) -> None:
    """Each error names the file or the field."""
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
        resolve("nobody/no-such-model")  # the tests run offline


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    """Both spellings are supported. The configured length is never reduced, and other kinds of scaling do not change
    it."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}

    def longest(**entries: object) -> int:
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5, **entries}))
        return read_info(tmp_path).max_model_len

    assert longest(max_position_embeddings=1000, rope_scaling=yarn) == 4000
    assert longest(max_position_embeddings=1000, rope_parameters={**yarn, "rope_type": "yarn"}) == 4000
    assert longest(max_position_embeddings=5000, rope_scaling=yarn) == 5000
    assert longest(max_position_embeddings=1000, rope_scaling={**yarn, "type": "llama3"}) == 1000
    assert longest(max_position_embeddings=1000, rope_scaling=None) == 1000
    assert longest(n_positions=500) == 500


def test_demo_info() -> None:
    """The demo checkpoint can be read, and its info agrees with its files."""
    info = read_info(resolve("demo"), name="demo")
    config = json.loads((DEMO / "config.json").read_text())
    assert info.max_model_len == config["max_position_embeddings"] >= 8192
    assert info.vocab_size == config["vocab_size"]
    assert Vocabulary(DEMO).encode("<|im_end|>")[0] in info.eos_token_ids
