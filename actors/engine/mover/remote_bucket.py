"""The border to obstore: objects of a bucket, within limits of time and size.

Called by `remote_store.py`, from any thread. Opened by `remote_opening.py`, which alone imports obstore.

What must always hold: a call ends within its limits, with a result, OSError or WrongLength, whatever the object store
sends and however the library fails (a panic in Rust code is no Exception); what is longer than expected is not read to
its end. The library bounds each request by time only: a page of a listing, which it reads whole, may be as long as the
object store makes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PANIC = "PanicException"
"""The class cannot be imported: each Rust library defines its own, in a module that does not exist."""
_MAX_REASON_CHARS = 600
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
"""In a 404: it is not the object that is missing."""
LISTED_TOGETHER = 256
"""Maximum number of objects in a page."""


@attrs.frozen
class BucketLimits:
    """How long operations may take, in seconds, and how much a listing may return."""

    connect_s: float = 2.0
    request_s: float = 5.0
    """One attempt, from connecting to the last byte."""
    whole_s: float = 10.0
    """All attempts of an operation, with the pauses between them; of a listing, for each page."""
    max_retries: int = 2
    listing_s: float = 3600.0
    max_listed: int = 8_000_000
    """Objects in a listing, of whatever name."""


class WrongLength(Exception):
    """An object does not have the expected length."""


@attrs.frozen
class ListedObject:
    """An object in a listing."""

    path: str
    num_bytes: int


class Bucket:
    """Objects below a prefix."""

    def __init__(
        self,
        store: ObjectStore,
        limits: BucketLimits,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` contains the objects if they are files."""
        self._store = store
        self.limits = limits
        self._folder = folder
        self._clock = clock
        self._lister = ThreadPoolExecutor(1, "remote_lists")
        self._listing = threading.Lock()

    def get(self, path: str, num_bytes: int) -> bytes | None:
        """Return the object at `path`, None if there is none.

        Raises OSError, and WrongLength if it does not have `num_bytes`; then little beyond these has been read.
        """
        with _errors_translated("GET"):
            try:
                found = self._store.get(path)
            except FileNotFoundError as error:
                if any(word in str(error) for word in _NO_BUCKET):
                    raise
                return None
            if found.meta["size"] != num_bytes:
                raise WrongLength(found.meta["size"])
            if self._folder is not None:  # as a stream, the library reads a file in pieces of 8 KiB
                return bytes(found.bytes())
            content = next(found.stream(min_chunk_size=max(1, num_bytes)), b"")  # in one piece, which saves a copy
        if len(content) != num_bytes:
            raise WrongLength(len(content))
        return content

    def put(self, path: str, content: bytes) -> None:
        """Store an object, whole or not at all. Raises OSError."""
        with _errors_translated("PUT"):
            self._store.put(path, content, use_multipart=False)
            if self._folder is not None:
                (self._folder / path).chmod(0o600)  # until then, the folder above it is closed to others

    def list_objects(self, folder: str) -> Iterator[list[ListedObject]]:
        """Yield the objects below a folder in pages. Raises OSError, also if there are too many or it takes too long.

        A request for a page that never ends keeps one thread. Until it does end, every other listing fails at once.
        """
        if not self._listing.acquire(blocking=False):
            raise BlockingIOError("LIST: another listing is in progress")
        pages: Iterator[list[ListedObject]] | None = None
        last: Future[list[ListedObject] | None] | None = None
        deadline = self._clock() + self.limits.listing_s
        num_listed = 0
        try:
            pages = self._pages(folder)
            while True:
                last = self._lister.submit(next, pages, None)
                if last not in wait([last], self.limits.whole_s).done:
                    raise TimeoutError(f"LIST: no page in {self.limits.whole_s:g} s, after {num_listed} objects")
                page = last.result()
                if page is None:
                    return
                num_listed += len(page)
                if num_listed > self.limits.max_listed or self._clock() > deadline:
                    raise OSError(f"LIST: not over after {num_listed} objects")
                yield page
        finally:
            if last is None:
                self._listing.release()
            else:  # when its thread is free again
                last.add_done_callback(lambda _: self._listing.release())

    def _pages(self, folder: str) -> Iterator[list[ListedObject]]:
        with _errors_translated("LIST"):
            for page in self._store.list(folder, chunk_size=LISTED_TOGETHER):
                yield [ListedObject(meta["path"], meta["size"]) for meta in page]

    def close(self) -> None:
        """Let go of the thread, which may still wait for a page."""
        self._lister.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _errors_translated(operation: str) -> Iterator[None]:
    """Turn whatever the library raises into OSError, with a reason that is short enough for a log."""
    try:
        yield
    except (WrongLength, TimeoutError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        reason = " ".join(str(error).partition("Debug source:")[0].split())
        raise OSError(f"{operation}: {type(error).__name__}: {reason[:_MAX_REASON_CHARS]}") from None
