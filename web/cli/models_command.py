"""`quipu models`: the models on this machine, their formats and sizes, and which of them can be served here.

Reads the hub's cache and folders that are named; asks no network. What a config says decides which family serves it, as
at a server's start (`kernels/models/families.py`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import huggingface_hub
from huggingface_hub.errors import CacheNotFound

from quipu.actors.shared.checkpoint import CheckpointError, read_json
from quipu.kernels.machine import memory

from .command_output import complain, indented, print_result, printable
from .command_progress import command_progress
from .one_line_parser import OneLineParser

ROOM = 1 << 30
"""What a server needs besides the weights, at least: a small KV cache, and the process itself."""
_TYPE = re.compile(r"[-.](?P<type>I?Q\d\w*|BF16|F16|F32)(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)
"""The type in the name of a GGUF file."""

Check = Callable[[dict[str, Any]], object]
"""Raises ValueError for a `config.json` that cannot be served, saying why."""


@attrs.frozen
class Model:
    """A model on this machine."""

    name: str
    """What `quipu serve` takes."""
    format: str
    num_bytes: int
    why_not: str = ""
    """Why it cannot be served here; empty if it can, as far as its config and its size say."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    arguments: argparse.Namespace = make_parser().parse_args(argv)
    try:
        with command_progress("looking at models", is_off=arguments.json):
            models = sorted(find_models(arguments.folders, memory().available), key=lambda model: model.name.lower())
    except OSError as error:
        return complain(error)
    if arguments.json:
        return print_result(indented([attrs.asdict(model) for model in models]).decode().rstrip())
    return print_result("\n".join(_table(models)))


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu models", description="List the models on this machine, and which can be served.")
    folders_help = "folders to look into, besides the hub's cache"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=folders_help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def find_models(folders: Iterable[Path], available: int) -> Iterator[Model]:
    """Yield what is in the hub's cache and in these folders, with `available` bytes of memory."""
    from quipu.kernels.models.families import find_family  # loads torch

    def check(config: dict[str, Any]) -> None:
        find_family(config).parse(config)

    for name, folder in [*_cached(), *((str(folder), folder) for folder in folders)]:
        yield from models_in(name, folder, available, check)


def models_in(name: str, folder: Path, available: int, check: Check) -> Iterator[Model]:
    """Yield the models of one folder: one with safetensors, and one for each type of GGUF files."""
    by_type: dict[str, int] = {}
    for path in folder.rglob("*.gguf"):
        match = _TYPE.search(path.name)
        if match is not None and not path.name.startswith("mmproj"):
            by_type[match["type"].upper()] = by_type.get(match["type"].upper(), 0) + path.stat().st_size
    for kind, num_bytes in by_type.items():
        yield Model(f"{name}:{kind}", f"GGUF {kind}", num_bytes, _why_no_room(num_bytes, available))
    if not (folder / "config.json").is_file():
        if not by_type:
            yield Model(name, "?", 0, "it has no config.json")
        return
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    try:
        config = read_json(folder / "config.json")
        kind = _format_of(config)
        check(config)
    except (CheckpointError, ValueError) as error:
        yield Model(name, "safetensors", num_bytes, str(error))
        return
    why_not = "its weights are not here" if not num_bytes else _why_no_room(num_bytes, available)
    yield Model(name, kind, num_bytes, why_not)


def _cached() -> Iterator[tuple[str, Path]]:
    """Yield the names and newest snapshots of the models in the hub's cache."""
    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return
    for repository in repositories:
        newest = max(repository.revisions, key=lambda revision: revision.last_modified, default=None)
        if repository.repo_type == "model" and newest is not None:
            yield repository.repo_id, newest.snapshot_path


def _format_of(config: dict[str, Any]) -> str:
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        return str(quantization.get("quant_method", "quantized"))
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _why_no_room(num_bytes: int, available: int) -> str:
    needed = num_bytes + ROOM
    return "" if needed <= available else f"it needs {needed / 1e9:.1f} GB, {available / 1e9:.1f} are available"


def _table(models: Sequence[Model]) -> Iterator[str]:
    if not models:
        yield "No models are in the hub's cache. `quipu serve owner/name` downloads one; `quipu serve demo` needs none."
        return
    width = max(len(model.name) for model in models)
    for model in models:
        verdict = f"no: {model.why_not}" if model.why_not else "yes"
        yield printable(f"{model.name:<{width}}  {model.format:<20} {model.num_bytes / 1e9:>7.2f} GB  {verdict}")
