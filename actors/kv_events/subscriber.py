"""Subscribes to another server's KV events, in a thread of its own, because ZeroMQ does not support trio.

What must always hold: the event loop is given what has changed, in order and in slices of which it takes one in each of
its iterations, and never waits for the thread; what the thread keeps is bounded by the follower and by ZeroMQ's
high-water mark, beyond which batches are lost, and with them all that was known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
import trio
import zmq

from ..threads import start_thread
from .event_log import KvEventsError
from .follower import CacheFollower, CacheNews

log = structlog.get_logger("quipu.kv_events")

HWM = 10_000
"""Batches that may wait for the thread."""
MAX_MESSAGE_BYTES = 64 << 20
"""Beyond it, ZeroMQ closes the connection and opens another one."""
POLL_MS = 200
"""How long `close` may have to wait for the thread."""
CLOSING_S = 2.0


class EventSubscriber:
    """Follows one publisher from `start` until `close`."""

    def __init__(self, endpoint: str, take: Callable[[CacheNews], object]) -> None:
        """`take` is called in the event loop that this is created in. Raises KvEventsError."""
        self._take = take
        self._token = trio.lowlevel.current_trio_token()
        self._endpoint = endpoint
        self._closing = False
        self._is_taken = threading.Event()
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.SUB)
            self._socket.set_hwm(HWM)
            self._socket.maxmsgsize = MAX_MESSAGE_BYTES
            if "[" in endpoint:
                self._socket.ipv6 = True
            self._socket.subscribe(b"")
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise KvEventsError(f"cannot connect to {endpoint}: {error.strerror}") from None
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        self._thread = await start_thread(self._run, "kv-follower")

    def close(self) -> None:
        self._closing = True
        self._is_taken.set()
        if self._thread is not None:
            self._thread.join(CLOSING_S)
        else:
            self._context.destroy(linger=0)

    def _run(self) -> None:
        follower = CacheFollower()
        try:
            while not self._closing:
                if not self._socket.poll(POLL_MS):
                    continue
                # not copied, which would hold the interpreter lock
                frames = self._socket.recv_multipart(copy=False)
                sequence = frames[1].bytes if len(frames) == 3 else b""
                try:
                    for news in follower.take(sequence, frames[-1].buffer):
                        self._give(news)
                except ValueError as error:
                    log.warning("kv_events.unreadable", endpoint=self._endpoint, error=str(error))
                    self._give(CacheNews(is_cleared=True))
        except trio.RunFinishedError:
            pass
        except Exception:
            log.exception("kv_events.not_followed", endpoint=self._endpoint)
        finally:
            self._context.destroy(linger=0)

    def _give(self, news: CacheNews) -> None:
        """Hand news to the event loop and wait until they are taken: it runs all calls that wait at once."""
        self._is_taken.clear()
        if not self._closing:
            self._token.run_sync_soon(self._take_and_say, news)
            self._is_taken.wait()

    def _take_and_say(self, news: CacheNews) -> None:
        try:
            self._take(news)
        finally:
            self._is_taken.set()
