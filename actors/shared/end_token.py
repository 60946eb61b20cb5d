"""The token that a checkpoint's tokenizer names as the end of a turn, read from its JSON files.

Used by `checkpoint.py` at start. Chat models that were made from base models often name it only here: their
config.json and generation_config.json keep the base model's end, and an answer that is not stopped at this one runs on,
and is billed.

What must always hold: a name that is no token of the vocabulary is no end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ID = re.compile("[0-9]{1,10}")
"""An id as a key of JSON. Longer ones are no ids, and Python refuses to read the longest."""

ReadJson = Callable[[Path], dict[str, Any]]


def end_token_ids(folder: Path, read_json: ReadJson) -> list[int]:
    """Return the id of tokenizer_config.json's `eos_token`, if there is one. `read_json` raises for a broken file."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return []
    config = read_json(path)
    value = config.get("eos_token")
    name = value.get("content") if isinstance(value, dict) else value
    if not isinstance(name, str):
        return []
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        for key, token in added.items():
            if isinstance(token, dict) and token.get("content") == name and _ID.fullmatch(key):
                return [int(key)]
    return _in_vocabulary(folder / "tokenizer.json", name, read_json)


def _in_vocabulary(path: Path, name: str, read_json: ReadJson) -> list[int]:
    if not path.exists():
        return []
    tokenizer = read_json(path)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == name:
            return _ids(token.get("id"))
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return _ids(vocabulary.get(name))
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        return [number for number, pair in enumerate(vocabulary) if isinstance(pair, list) and pair[:1] == [name]][:1]
    return []


def _ids(value: object) -> list[int]:
    return [value] if type(value) is int and value >= 0 else []
