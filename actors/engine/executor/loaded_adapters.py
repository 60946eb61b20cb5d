"""The adapters that an engine's backend has loaded.

What must always hold: one thread loads at a time; an adapter is dropped by the thread that runs passes.
"""

from __future__ import annotations

from pathlib import Path

from quipu.kernels.backend import Backend


class LoadedAdapters:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.digests: set[str] = set()

    def load(self, folder: str, digest: str) -> str:
        """Load an adapter, unless one with this digest is loaded; return its digest. Raises what the backend raises."""
        if digest not in self.digests:
            digest = self._backend.load_adapter(Path(folder), digest or None)
            self.digests.add(digest)
        return digest

    def drop(self, digest: str) -> None:
        """Unload an adapter, if it is loaded. No pass with it may be running."""
        if digest in self.digests:
            self.digests.discard(digest)
            self._backend.unload_adapter(digest)
