"""Read what a checkpoint's files say about its output. The only module here that opens files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from ...shared.checkpoint import read_json

KEY = "response_template"


@attrs.frozen
class ParserFiles:
    own_template: dict[str, Any] | None
    """The `response_template`, if it is an object."""
    special_ids: dict[str, int]
    """The ids of special tokens, by text."""
    added_ids: dict[str, int]
    """The ids of all tokens that are recognized in text as a whole, by text."""


def read_parser_files(path: Path) -> ParserFiles:
    """Read tokenizer_config.json and tokenizer.json of the checkpoint in `path`; files that are missing say nothing.

    Raises CheckpointError.
    """
    config, tokenizer = (_read(path / name) for name in ("tokenizer_config.json", "tokenizer.json"))
    template = config.get(KEY)
    special_ids, added_ids = {}, {}
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        match token:
            case {"content": str(text), "id": int(token_id)} if text:
                added_ids[text] = token_id
                if token.get("special") is True:
                    special_ids[text] = token_id
    return ParserFiles(template if isinstance(template, dict) else None, special_ids, added_ids)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return read_json(path)
