"""Finds the checkpoint that the server serves on the node of an engine, or fetches it: `find_or_fetch`.

An engine's keeper calls it before it starts the engine. It looks at the same path, the copy that ships with the
package, the hub's cache, and the cache of checkpoints that were fetched earlier, and takes a folder only if its
`Outline` is that of the wanted checkpoint.

What must always hold: nothing is downloaded from the hub, and nothing at all if there is no source.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import attrs

from ...config.cluster_config import SHIP_FLAG
from ...shared.checkpoint import DEMO, CheckpointError, resolve
from ...shared.hub import HubError, fetch, is_hub_id
from .manifest import Manifest
from .outline import Outline, find_difference, make_outline
from .shipping import LOCK_SUFFIX, PARTIAL_SUFFIX, PieceSource, Say, fetch_checkpoint


@attrs.frozen
class Wanted:
    """The checkpoint that the server serves."""

    model: str
    """As the operator named it: a folder, a hub id, or `demo`."""
    path: str
    """Its folder on the server's node."""
    outline: Outline


def describe_wanted(model: str, path: Path) -> Wanted:
    """Return what other nodes must find. Reads a little of every file: blocks. Raises CheckpointError."""
    return Wanted(model, str(path.absolute()), make_outline(path))


def default_cache() -> Path:
    """Return the folder of this user's fetched checkpoints."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # relative ones are to be ignored (XDG Base Directory Specification)
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "quipu" / "checkpoints"


def find_or_fetch(wanted: Wanted, source: PieceSource | None, cache: Path, say: Say) -> Path:
    """Return a folder on this node with the wanted checkpoint, if need be from `source`. Raises CheckpointError."""
    looked: list[str] = []
    for place, folder in _candidates(wanted, cache):
        if folder is None:
            looked.append(f"{place}: not there")
        elif difference := find_difference(folder, wanted.outline):
            looked.append(f"{place}: {difference}")
        else:
            say(f"found the checkpoint in {folder}")
            return folder
    places = "; ".join(looked)
    node = socket.gethostname()
    if source is None:
        raise CheckpointError(
            f"node {node} does not have the checkpoint of {wanted.model}. Looked for in: {places}. Put it there at the "
            f"same path, or have the server ship it with {SHIP_FLAG}"
        )
    say(f"the checkpoint is not on this node; looked for in: {places}")
    try:
        manifest = source.manifest()
        _check_same(manifest, wanted)
        folder = fetch_checkpoint(
            source, manifest, cache, say, is_right=lambda folder: find_difference(folder, wanted.outline) is None
        )
        if difference := find_difference(folder, wanted.outline):
            raise CheckpointError(f"what was shipped is not what the server serves: {difference}")
    except CheckpointError as error:
        raise CheckpointError(
            f"node {node} could not fetch the checkpoint of {wanted.model}: {error}. Looked for before in: {places}"
        ) from error
    return folder


def _candidates(wanted: Wanted, cache: Path) -> Iterator[tuple[str, Path | None]]:
    """Yield places, in words, and the folder there."""
    path = Path(wanted.path)
    yield wanted.path, path if path.is_dir() else None
    if wanted.model == "demo":
        yield str(DEMO), DEMO
    if Path(wanted.model).suffix.lower() == ".gguf":
        yield wanted.model, _from_file(wanted.model)
    if is_hub_id(wanted.model):
        yield _hub_cache(), _in_hub_cache(wanted.model, path)
    fetched = _fetched(cache)
    yield from ((str(folder), folder) for folder in fetched)
    if not fetched:
        yield str(cache), None


def _from_file(model: str) -> Path | None:
    """Return the folder that is made for GGUF files, None if there are none or they cannot be read."""
    try:
        return resolve(model, only_local=True)
    except CheckpointError:
        return None


def _hub_cache() -> str:
    from huggingface_hub import constants

    return f"the hub cache {constants.HF_HUB_CACHE}"


def _in_hub_cache(model: str, path: Path) -> Path | None:
    """Return the snapshot in the hub's cache, of the server's commit if that is known, or the folder made of it."""
    if ":" in model:
        return _from_file(model)
    try:
        return fetch(model, revision=path.name if path.parent.name == "snapshots" else None, only_local=True)
    except HubError:
        return None


def _fetched(cache: Path) -> list[Path]:
    try:
        return sorted(
            path for path in cache.iterdir() if path.suffix not in (PARTIAL_SUFFIX, LOCK_SUFFIX) and path.is_dir()
        )
    except OSError:
        return []


def _check_same(manifest: Manifest, wanted: Wanted) -> None:
    """Raise CheckpointError, before anything is fetched, if the source offers another checkpoint."""
    offered = [(file.name, file.size) for file in manifest.files]
    if offered != [(file.name, file.size) for file in wanted.outline.files]:
        raise CheckpointError("the node that ships offers other files than the server serves")
