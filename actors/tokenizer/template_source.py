"""Find the chat template among a checkpoint's files.

`wiring.py` reads it once and hands it to the processes that render chats (`text_workers/chat_pool.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from ..shared.checkpoint import CheckpointError, read_json


@attrs.frozen
class TemplateSource:
    """A chat template as the checkpoint ships it."""

    origin: str
    """The checkpoint's folder, for error messages."""
    source: str
    variables: Mapping[str, str]
    """Special tokens by name."""


def read_template(folder: Path) -> TemplateSource | None:
    """Return the chat template of the checkpoint in `folder`, or None if it has none.

    Raises CheckpointError, naming the file or entry that is invalid.
    """
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    file = folder / "chat_template.jinja"
    try:
        source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if isinstance(source, list):  # several templates, each with a name
        if not all(isinstance(entry, dict) for entry in source):
            raise CheckpointError("tokenizer_config.json: the entries of chat_template must be objects")
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("tokenizer_config.json: chat_template must be a string or a list of named templates")
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
        elif value is not None:
            raise CheckpointError(f"tokenizer_config.json: {name} must be a string or an object with a `content`")
    return TemplateSource(str(folder), source, special)
