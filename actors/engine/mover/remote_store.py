"""The blocks in an object store: an object for each, which other servers find, too.

Called by the mover's carrier, from threads. There are no slots here: the number of a slot is ignored, and a block is
found by its key. Blocks of a call travel concurrently.

    write   seal ─▶ put                                          remote_object.py, remote_bucket.py
    read    get ─▶ open ─▶ copy, if in time ─▶ header

What must always hold: what does not open with this deployment's keys is never returned as a block; a call ends within
the bucket's limits, and at once while the bucket fails (`remote_health.py`); `memory` is not touched after the return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from ...messages.mover import ListedPage
from .block_header import BlockHeader
from .remote_bucket import Bucket, WrongLength
from .remote_health import RemoteHealth
from .remote_keys import RemoteKeys
from .remote_names import BlockNames
from .remote_object import OVERHEAD_BYTES, Forged, ObjectFormat, OpenedObject

LOADING_THREADS = 16
STORING_THREADS = 8
UNREADABLE = BlockHeader(b"", 0, "", 0)
"""The header of an object that does not open. It is no block's, so that the carrier counts it as corrupt."""

T = TypeVar("T")


class RemoteStore:
    """The bytes of the object store tier."""

    def __init__(
        self,
        bucket: Bucket,
        keys: RemoteKeys,
        *,
        numerics: str,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = BlockNames(keys, numerics)
        self._bucket = bucket
        self._format = ObjectFormat(keys)
        self._numerics = numerics
        self._block_bytes = block_bytes
        self._clock = clock
        self._loaders = ThreadPoolExecutor(LOADING_THREADS, "remote_loads")
        self._storers = ThreadPoolExecutor(STORING_THREADS, "remote_stores")
        self._lock = threading.Lock()
        self._loads, self._stores = RemoteHealth(), RemoteHealth()

    def write(self, slots: Sequence[int], headers: Sequence[BlockHeader], memory: memoryview) -> None:
        """Store blocks. Raises OSError if any was not stored."""
        size = self._block_bytes
        if any(header.numerics != self._numerics for header in headers):
            raise OSError("a block was computed with other numerics than this store's")
        with self._attempt(self._stores):
            puts: list[Callable[[], None]] = []
            for index, header in enumerate(headers):  # here, because `memory` is only lent
                digest = self.names.digest_of(header.key)
                block = memory[index * size : (index + 1) * size]
                sealed = self._format.seal(digest, header.num_tokens, header.checksum, block)
                puts.append(partial(self._bucket.put, self.names.path_of(digest), sealed))
            self._run_together(self._storers, puts)

    def read(self, slots: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> list[BlockHeader | None]:
        """Fill `memory` with the blocks of `keys`. An object that does not open has the header UNREADABLE.

        Raises OSError if any block could not be asked for, or did not come in time.
        """
        size = self._block_bytes
        with self._attempt(self._loads):
            results = self._run_together(self._loaders, [partial(self._get, key) for key in keys])
        headers: list[BlockHeader | None] = []
        for index, (key, result) in enumerate(zip(keys, results, strict=True)):
            if isinstance(result, OpenedObject):
                memory[index * size : (index + 1) * size] = result.block
                headers.append(BlockHeader(key, result.num_tokens, self._numerics, result.checksum))
            else:
                headers.append(result)
        return headers

    def list_names(self) -> Iterator[ListedPage]:
        """Yield the names of all blocks that a server like this one has stored, for a `RemoteIndex`.

        To be called in a thread of its own. Objects with other names or sizes are left out. Raises OSError; the last
        page says that it is the last.
        """
        for page in self._bucket.list_objects(self.names.folder):
            ours = (item for item in page if item.num_bytes == self._block_bytes + OVERHEAD_BYTES)
            names = (self.names.name_in(item.path) for item in ours)
            yield ListedPage([name for name in names if name is not None], is_last=False)
        yield ListedPage([], is_last=True)

    def clear(self) -> None:
        """Do nothing: the objects belong to other servers, too."""

    def close(self) -> None:
        """Let go of all threads. Those whose operation was given up end when it does."""
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._storers.shutdown(wait=False, cancel_futures=True)
        self._bucket.close()

    def _get(self, key: bytes) -> OpenedObject | BlockHeader | None:
        digest = self.names.digest_of(key)
        try:
            sealed = self._bucket.get(self.names.path_of(digest), self._block_bytes + OVERHEAD_BYTES)
            return None if sealed is None else self._format.open(digest, sealed)
        except (WrongLength, Forged):
            return UNREADABLE

    def _run_together(self, threads: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of calls. Raises OSError when one of them does, or if any is not over in time."""
        futures = [threads.submit(call) for call in calls]
        over = wait(futures, self._bucket.limits.whole_s, FIRST_EXCEPTION)
        for future in over.not_done:
            future.cancel()
        for future in over.done:
            future.result()
        if over.not_done:
            raise TimeoutError(f"{len(over.not_done)} of {len(calls)} blocks after {self._bucket.limits.whole_s:g} s")
        return [future.result() for future in futures]

    @contextmanager
    def _attempt(self, health: RemoteHealth) -> Iterator[None]:
        """Note how an attempt ends. Raises OSError without one while the object store fails."""
        with self._lock:
            if not health.may_try(self._clock()):
                raise OSError(f"the object store is not asked: {health.num_failures} attempts in a row have failed")
        try:
            yield
        except BaseException:
            with self._lock:
                health.failed(self._clock())
            raise
        with self._lock:
            health.succeeded()
