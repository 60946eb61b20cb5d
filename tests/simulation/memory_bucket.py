"""An object store in memory, for `--kv-remote`: what engines use of obstore, and threads that are none.

`Bucket` and `RemoteStore` are the server's own. Calls that they hand to threads are done at once, in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import attrs

from quipu.actors.engine.mover import remote_bucket, remote_opening, remote_store
from quipu.actors.engine.mover.remote_bucket import Bucket
from quipu.actors.engine.mover.remote_keys import RemoteKeys

URL = "s3://simulated/blocks"
KEYS = RemoteKeys.derive(bytes(range(32)), None)


@attrs.define(eq=False)
class BucketDials:
    """Faults of an object store."""

    fails_reads: bool = False
    """Neither objects nor listings come."""
    fails_writes: bool = False
    num_to_damage: int = 0
    """So many of the next objects come with other bytes than were stored."""
    num_to_lose: int = 0
    """So many of the next objects are gone."""


@attrs.define(eq=False)
class Objects:
    """Implements what `Bucket` needs of an object store. All engines of a run share one."""

    dials: BucketDials
    _objects: dict[str, bytes] = attrs.field(factory=dict)

    def get(self, path: str) -> Found:
        if self.dials.fails_reads:
            raise OSError("the object store is down")
        if self.dials.num_to_lose and path in self._objects:
            self.dials.num_to_lose -= 1
            del self._objects[path]
        content = self._objects.get(path)
        if content is None:
            raise FileNotFoundError(path)
        if self.dials.num_to_damage:
            self.dials.num_to_damage -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        return Found(content)

    def put(self, path: str, content: Any, *, use_multipart: bool) -> None:
        if self.dials.fails_writes:
            raise OSError("the object store is full")
        self._objects[path] = bytes(content)

    def list(self, folder: str, *, chunk_size: int) -> Iterator[list[dict[str, Any]]]:
        if self.dials.fails_reads:
            raise OSError("the object store is down")
        found = [{"path": path, "size": len(content)} for path, content in self._objects.items() if folder in path]
        for first in range(0, len(found), chunk_size):
            yield found[first : first + chunk_size]


@attrs.frozen
class Found:
    """An object."""

    content: bytes

    @property
    def meta(self) -> dict[str, int]:
        return {"size": len(self.content)}

    def stream(self, *, min_chunk_size: int) -> Iterator[bytes]:
        yield self.content


class CallsAtOnce:
    """Stands for a pool of threads."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass


@contextmanager
def stood_in_for_buckets(dials: BucketDials) -> Iterator[None]:
    """Have all engines use one object store in memory."""
    objects: Any = Objects(dials)
    with ExitStack() as stack:
        for module in (remote_bucket, remote_store):
            stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", CallsAtOnce))
        stack.enter_context(mock.patch.object(remote_opening, "read_remote_keys", lambda *_: KEYS))
        stack.enter_context(mock.patch.object(remote_opening, "open_bucket", lambda _, limits: Bucket(objects, limits)))
        yield
