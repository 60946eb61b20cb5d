"""Fetches a checkpoint, a piece at a time, from the node that has it; once per node, however many engines want it.

`checkpoint_finder.py` calls `fetch_checkpoint` if it finds nothing else. Pieces come from a `PieceSource`
(`ray_pieces.py`).

What must always hold: a piece is written only if it has its digest; memory is bounded by `PIECES_IN_FLIGHT` pieces; the
folder that is returned is complete. Everything here blocks, and is called off the event loop.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ...shared.checkpoint import CheckpointError
from .manifest import Manifest, check_manifest
from .partial_copy import PartialCopy, PieceKey

PIECES_IN_FLIGHT = 4
"""Pieces of one node that are asked for, checked or written at a time."""
MAX_TRIES = 4
SAY_EVERY_S = 5.0
PARTIAL_SUFFIX, LOCK_SUFFIX = ".partial", ".lock"

Say = Callable[[str], None]


class PieceSource(Protocol):
    """Where a checkpoint can be fetched. Several threads use it at a time."""

    def manifest(self) -> Manifest:
        """Return what the checkpoint consists of, perhaps after reading all of it. Raises CheckpointError."""

    def read(self, file: str, piece: int) -> bytes | memoryview:
        """Return a piece. Raises CheckpointError if it is not available, OSError if another try may succeed."""


def fetch_checkpoint(
    source: PieceSource,
    manifest: Manifest,
    cache: Path,
    say: Say,
    *,
    is_right: Callable[[Path], bool],
    pieces_in_flight: int = PIECES_IN_FLIGHT,
) -> Path:
    """Return this node's folder of the checkpoint, below `cache`, once no other process is fetching it.

    `is_right` says whether an existing folder may be used; if not, it is repaired. Raises CheckpointError.
    """
    check_manifest(manifest)
    final = cache / manifest.digest
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(final.with_name(final.name + LOCK_SUFFIX), say):
            if final.is_dir():
                if is_right(final):
                    return final
                say(f"{final} is damaged and is fetched again where it is wrong")
                if partial.is_dir():
                    shutil.rmtree(partial)
                final.rename(partial)
            copy = PartialCopy(manifest, partial, final)
            copy.prepare()
            missing = list(copy.missing_pieces())
            copy.check_room()
            _fetch_pieces(source, manifest, copy, missing, say, pieces_in_flight)
            copy.finish()
    except OSError as error:
        raise CheckpointError(f"{error.filename or cache} cannot be used: {error.strerror or error}") from error
    return final


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Hold a file's lock for the length of a block. The system releases it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another engine on this node is fetching the checkpoint; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fetch_pieces(
    source: PieceSource, manifest: Manifest, copy: PartialCopy, missing: list[PieceKey], say: Say, in_flight: int
) -> None:
    """Fetch pieces in parallel, until the first error."""
    progress = _Progress(manifest, missing, say)
    waiting = iter(missing)
    lock, stopped = threading.Lock(), threading.Event()

    def fetch_some() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    piece = next(waiting, None)
                if piece is None:
                    return
                copy.write(piece, data := _fetch_piece(source, manifest, piece))
                progress.add(len(data))
                del data  # before the next one arrives, so that there is one per thread
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(in_flight, thread_name_prefix="fetch") as pool:
        try:
            fetching = [pool.submit(fetch_some) for _ in range(min(in_flight, len(missing)))]
            wait(fetching, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()
        for future in fetching:
            future.result()
    progress.end()


def _fetch_piece(source: PieceSource, manifest: Manifest, piece: PieceKey) -> memoryview:
    """Return a piece that has the size and digest of the manifest. Raises CheckpointError after `MAX_TRIES`."""
    start, end = manifest.span(piece.file, piece.number)
    for _ in range(MAX_TRIES):
        data = memoryview(b"")  # lets go of a wrong piece before the next one arrives
        try:
            data = memoryview(source.read(piece.file.name, piece.number)).cast("B")
        except OSError as error:
            fault = f"could not be read: {error}"
            continue
        if data.nbytes != end - start:
            fault = f"arrived with {data.nbytes} bytes instead of {end - start}"
        elif hashlib.sha256(data).digest() != piece.digest:
            fault = "arrived with other contents than their digest says"
        else:
            return data
    raise CheckpointError(
        f"bytes {start} to {end} of {piece.file.name} {fault}, {MAX_TRIES} times; what has arrived so far is kept"
    )


class _Progress:
    """Says from time to time how much has arrived. Several threads call `add`."""

    def __init__(self, manifest: Manifest, missing: list[PieceKey], say: Say) -> None:
        spans = [manifest.span(piece.file, piece.number) for piece in missing]
        self._total = sum(end - start for start, end in spans)
        self._say = say
        self._arrived = 0
        self._lock = threading.Lock()
        self._begun = self._said = time.monotonic()
        kept = manifest.num_bytes - self._total
        kept_words = f"; {kept} bytes are here from an earlier attempt" if kept else ""
        say(f"fetching {self._total} bytes of the checkpoint in {len(missing)} pieces{kept_words}")

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived += num_bytes
            now = time.monotonic()
            if now - self._said < SAY_EVERY_S:
                return
            self._said = now
            line = f"fetched {self._arrived} of {self._total} bytes ({100 * self._arrived // self._total} %)"
        self._say(line)

    def end(self) -> None:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        self._say(f"fetched {self._total} bytes in {seconds:.1f} s, {self._total / seconds / 1e6:.0f} MB/s")
