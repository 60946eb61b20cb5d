"""The tokens that a checkpoint's tokenizer names as the end of a turn, read from its JSON files.

Used by `checkpoint.py` at start. Chat models that were made from base models often name it only here: their
config.json and generation_config.json keep the base model's end, and an answer that is not stopped at this one runs on,
and is billed.

What must always hold: a name that is not in the vocabulary never ends a turn.
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
    """Return the ids of the `eos_token` of tokenizer_config.json and of the older special_tokens_map.json.

    `read_json` raises for a broken file.
    """
    files = [folder / "tokenizer_config.json", folder / "special_tokens_map.json"]
    config, special = (read_json(path) if path.exists() else {} for path in files)
    names = dict.fromkeys(name for name in (_name(config), _name(special)) if name is not None)
    return [token_id for name in names for token_id in _find(name, config, folder / "tokenizer.json", read_json)]


def _name(file: dict[str, Any]) -> str | None:
    value = file.get("eos_token")
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _find(name: str, config: dict[str, Any], tokenizer: Path, read_json: ReadJson) -> list[int]:
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        for key, token in added.items():
            if isinstance(token, dict) and token.get("content") == name and _ID.fullmatch(key):
                return [int(key)]
    return _in_vocabulary(tokenizer, name, read_json)


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
