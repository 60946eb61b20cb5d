"""Checkpoints of the Hugging Face hub: `owner/name`, or a repository's GGUF files of one type, `owner/name:Q4_K_M`.

Called by `checkpoint.py` when the server starts, and on other nodes, where nothing is downloaded. What must always
hold: of a repository with GGUF files of many types, only those of the wanted type are fetched.
"""

from __future__ import annotations

import re
from pathlib import Path

_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<type>[\w-]+))?", re.ASCII)
_JSON_AND_WEIGHTS = ["*.json", "*.safetensors", "*.jinja"]
_OTHER_GGUF = ["mmproj*", "*/mmproj*"]
"""Image encoders, which are stored beside models of the same types."""


class HubError(ValueError):
    """There is no such checkpoint, or it could not be fetched. The message says why, and does not name the model."""


def is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None


def fetch(model: str, *, revision: str | None = None, only_local: bool = False) -> Path:
    """Return the folder of a model's snapshot, or the first of its GGUF files, downloaded unless `only_local`.

    Without a network, it is the snapshot that was downloaded before. Raises HubError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    match = _HUB_ID.fullmatch(model)
    if match is None:
        raise HubError("it must have the form owner/name, or owner/name:TYPE for GGUF")
    kind = match["type"]
    try:
        folder = Path(
            snapshot_download(
                match["repository"],
                revision=revision,
                local_files_only=only_local,
                allow_patterns=_JSON_AND_WEIGHTS if kind is None else _patterns(kind),
                ignore_patterns=None if kind is None else _OTHER_GGUF,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise HubError(str(error)) from error
    if kind is not None:
        return _find_type(folder, kind)
    if not (folder / "config.json").exists():
        raise HubError("it has no config.json; to serve one of its GGUF files, name the type, as in owner/name:Q4_K_M")
    return folder


def _patterns(kind: str) -> list[str]:
    """Return what matches the names of files of a type, in any folder: `Name-Q4_K_M.gguf`, `q4_k_m/name-00001-of-…`."""
    spellings = dict.fromkeys((kind, kind.upper(), kind.lower()))
    ends = (".gguf", "-?????-of-?????.gguf")
    return [f"{start}{spelling}{end}" for spelling in spellings for end in ends for start in ("", "*[-._/]")]


def _find_type(folder: Path, kind: str) -> Path:
    name = re.compile(rf"(?:.*[-._])?{re.escape(kind)}(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    files = sorted(path for path in folder.rglob("*.gguf") if name.fullmatch(path.name))
    models = [path for path in files if not path.name.startswith("mmproj")]
    firsts = [path for path in models if re.search(r"-of-\d{5}\.gguf$", path.name) is None or "-00001-of-" in path.name]
    if len(firsts) != 1:
        found = ", ".join(path.relative_to(folder).as_posix() for path in firsts[:5])
        raise HubError(
            f"several GGUF files are of type {kind}: {found}" if firsts else f"no GGUF file is of type {kind}"
        )
    return firsts[0]
