"""A GGUF file as a checkpoint's folder: its keys as the JSON files that all readers know, and a link to the file.

Called once, by the process that serves, before anything else reads the checkpoint; without torch. The folder is removed
when that process ends.

What must always hold: the folder has what the file says and nothing else; the file itself is not copied.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from .gguf_config import make_config, make_generation_config
from .gguf_file import GGUF_FILE, read_gguf
from .gguf_tokenizer import make_tokenizer, make_tokenizer_config


def make_gguf_folder(path: Path) -> Path:
    """Return a new folder for the file. Raises ValueError naming the key or tensor that is not supported."""
    path = path.resolve()
    file = read_gguf(path)
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
    (folder / GGUF_FILE).symlink_to(path)
    return folder


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file that a folder consists of, None if it has other weights or none.

    Raises ValueError if it has several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    found = sorted(folder.glob("*.gguf"))
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(
            f"{folder} has several GGUF files, name one of them: {', '.join(path.name for path in found[:5])}"
        )
    return found[0]
