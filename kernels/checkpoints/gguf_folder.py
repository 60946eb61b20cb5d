"""A GGUF model as a checkpoint's folder: its keys as the JSON files that all readers know, and links to its files.

Made by the process that serves, without torch; removed when that process ends.

What must always hold: the folder has what the files say and nothing else; the files themselves are not copied.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from .gguf_config import make_config, make_generation_config
from .gguf_parts import part_name, part_number, part_paths, read_gguf_model
from .gguf_tokenizer import make_tokenizer, make_tokenizer_config

_LINK = "model.gguf"
_LINK_STEM = "model"
"""Of the links' names if there are several parts."""


def make_gguf_folder(path: Path) -> Path:
    """Return a new folder for the model, of which `path` is the file, or any of its parts.

    Raises ValueError naming the file, and the key or tensor that is not supported.
    """
    path = path.absolute()  # not resolved: in the hub's cache a link has the name, and its target a number
    file = read_gguf_model(path)
    try:
        contents = {
            "config.json": make_config(file),
            "generation_config.json": make_generation_config(file),
            "tokenizer.json": make_tokenizer(file),
            "tokenizer_config.json": make_tokenizer_config(file),
        }
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    folder = Path(tempfile.mkdtemp(prefix="quipu-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), "utf-8")
    paths = part_paths(path)
    for number, part in enumerate(paths, 1):
        name = _LINK if len(paths) == 1 else part_name(_LINK_STEM, number, len(paths))
        (folder / name).symlink_to(part.resolve())
    return folder


def find_linked(folder: Path) -> Path | None:
    """Return the file, or its first part, that a folder made here links to; None: there are other weights in it."""
    whole = folder / _LINK
    return whole if whole.is_file() else next(folder.glob(f"{_LINK_STEM}-00001-of-*.gguf"), None)


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file that a folder consists of, or its first part; None if it has other weights or none.

    Raises ValueError if there are several models.
    """
    if any(folder.glob("*.safetensors")):
        return None
    found = sorted(folder.glob("*.gguf"))
    if not found:
        return None
    found = [path for path in found if part_number(path) in (None, 1)] or found[:1]
    if len(found) > 1:
        raise ValueError(
            f"{folder} has several GGUF files, name one of them: {', '.join(path.name for path in found[:5])}"
        )
    return found[0]
