"""Find the chat templates among a checkpoint's files, as transformers does.

`wiring.py` reads them once, for the processes that render chats (`text_workers/chat_pool.py`). Of several, by name,
`tool_use` renders chats with tools, if there is one, and `default` all others.

What must always hold: files with templates take precedence over entries of tokenizer_config.json, even if there is no
`default` among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from ..shared.added_tokens import CONFIG, read_special_tokens
from ..shared.checkpoint import CheckpointError, read_json

FILE = "chat_template.jinja"
OLD_FILE = "chat_template.json"
"""The file of image processors, the only one that some checkpoints have."""
FOLDER = "additional_chat_templates"
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
_NO_DEFAULT = "{{ raise_exception('The checkpoint has several chat templates, of which none is the default.') }}"
_MAX_CHARACTERS = 8 << 20
_MAX_TEMPLATES = 1000


@attrs.frozen
class TemplateSource:
    origin: str
    """The checkpoint's folder, for error messages."""
    source: str
    variables: Mapping[str, str]
    """Special tokens by name."""
    tool_source: str | None = None
    """The template for chats with tools, if that is another one."""
    lists_parts: bool = False
    """The template is given contents as lists of texts and images: the model reads images."""

    @property
    def text(self) -> str:
        """Both templates, to find what they support."""
        return self.source if self.tool_source is None else f"{self.tool_source}\n{self.source}"


def read_template(folder: Path, *, lists_parts: bool = False) -> TemplateSource | None:
    """Return the chat templates of the checkpoint in `folder`, or None if it has none. `lists_parts`: as in its result.

    Raises CheckpointError, naming the file or entry that is invalid.
    """
    path = folder / CONFIG
    config = read_json(path) if path.exists() else {}
    templates = _read_files(folder) or _by_name(config.get("chat_template"), CONFIG)
    if not templates and (folder / OLD_FILE).exists():
        templates = _by_name(read_json(folder / OLD_FILE).get("chat_template"), OLD_FILE)
    if templates is None:
        return None
    special = read_special_tokens(folder).texts
    default, for_tools = templates.get(_DEFAULT, _NO_DEFAULT), templates.get(_FOR_TOOLS)
    return TemplateSource(str(folder), default, special, for_tools, lists_parts)


def _read_files(folder: Path) -> dict[str, str]:
    """Return the templates in files of their own, by name."""
    found = {_DEFAULT: _read(folder / FILE)} if (folder / FILE).exists() else {}
    paths = sorted(islice((folder / FOLDER).glob("*.jinja"), _MAX_TEMPLATES + 1))
    if len(paths) > _MAX_TEMPLATES:
        raise CheckpointError(f"{folder / FOLDER} has more than {_MAX_TEMPLATES} templates")
    return found | {path.name.removesuffix(".jinja"): _read(path) for path in paths}


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _checked(text, str(path))


def _by_name(value: Any, file: str) -> dict[str, str] | None:
    """Return the templates of an entry `chat_template`, one or several with names; None if it is absent."""
    if value is None:
        return None
    if isinstance(value, str):
        return {_DEFAULT: _checked(value, file)}
    if isinstance(value, list) and all(isinstance(entry, dict) and "name" in entry for entry in value):
        templates = {str(entry["name"]): entry.get("template") for entry in value}
    elif isinstance(value, dict):
        templates = value
    else:
        raise CheckpointError(f"{file}: chat_template must be a string or a list of objects with name and template")
    for name, template in templates.items():
        if not isinstance(template, str):
            raise CheckpointError(f"{file}: chat_template {name[:80]!r} must be a string")
        _checked(template, file)
    return templates


def _checked(template: str, place: str) -> str:
    if len(template) > _MAX_CHARACTERS:
        raise CheckpointError(f"{place}: a chat template has more than {_MAX_CHARACTERS} characters")
    return template
