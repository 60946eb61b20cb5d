"""Reads pieces of a checkpoint that is on this machine: the node that ships does this for the others.

What must always hold: only files that the manifest lists are read, and a piece of a file that has changed since is
never handed out.
"""

from __future__ import annotations

import threading
from pathlib import Path

from ...shared.checkpoint import CheckpointError
from .manifest import PIECE_BYTES, ListedFolder, Manifest, make_manifest
from .served_files import open_unchanged, read_into


class LocalPieces:
    """A `PieceSource` of a folder. Several threads may use it."""

    def __init__(self, folder: Path, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._folder = folder
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._listed: ListedFolder | None = None

    def manifest(self) -> Manifest:
        """Return what the folder consists of; the first call hashes it, and others wait. Raises CheckpointError."""
        return self._list().manifest

    def read(self, file: str, piece: int) -> memoryview:
        """Return a piece. Raises CheckpointError if there is no such piece, or if the file has changed."""
        listed = self._list()
        entry = next((entry for entry in listed.manifest.files if entry.name == file), None)
        if entry is None or not 0 <= piece < len(entry.digests):
            raise CheckpointError(f"the checkpoint in {self._folder} has no piece {piece} of {file[:80]!r}")
        start, end = listed.manifest.span(entry, piece)
        buffer = memoryview(bytearray(end - start))
        with open_unchanged(self._folder / file, listed.states[file]) as (descriptor, _):
            read_into(descriptor, start, buffer)
        return buffer

    def _list(self) -> ListedFolder:
        with self._lock:
            if self._listed is None:
                self._listed = make_manifest(self._folder, piece_bytes=self._piece_bytes)
            return self._listed
