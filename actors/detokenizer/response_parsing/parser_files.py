"""Read what a checkpoint's files say about its output. The only module here that opens files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from ...shared.checkpoint import read_json
from ...shared.tokenizers_library import Library

KEY = "response_template"


@attrs.frozen
class ParserFiles:
    own_template: dict[str, Any] | None
    """The `response_template`, if it is an object."""
    special_ids: dict[str, int]
    """The ids of special tokens, by text."""
    added_ids: dict[str, int]
    """The ids of all tokens that are recognized in text as a whole, by text."""


def read_parser_files(path: Path, library: Library) -> ParserFiles:
    """Read tokenizer_config.json of the checkpoint in `path`; a file that is missing says nothing.

    `library` is the checkpoint's tokenizer, which has the tokens of all its files. Raises CheckpointError.
    """
    config = path / "tokenizer_config.json"
    template = read_json(config).get(KEY) if config.exists() else None
    special_ids, added_ids = {}, {}
    for token_id, token in library.tokenizer.get_added_tokens_decoder().items():
        if token.content:
            added_ids[token.content] = token_id
            if token.special:
                special_ids[token.content] = token_id
    return ParserFiles(template if isinstance(template, dict) else None, special_ids, added_ids)
