"""Publishes the contents of the prefix cache for routers: KV events over ZeroMQ, as vLLM publishes them.

The block manager's actor calls `flush` after each grant, which encodes and numbers a batch. The two sockets belong to a
thread, because ZeroMQ does not support trio. Nothing in the engine ever waits for that thread or for a subscriber.

    PUB     every batch: [topic, number, payload]; a number is 8 bytes, big-endian
    ROUTER  a request is [number]; the reply is every batch kept from that number on, as on PUB, then
            [empty topic, number -1, empty payload]

If a subscriber or the thread is too slow, the subscriber sees a gap in the numbers, which it repairs by requesting a
replay; the engine is never delayed. Payloads contain token ids: anyone who can subscribe can read prompts.
"""

from __future__ import annotations

import os
import threading
import time

import msgspec
import structlog
import zmq

from ..config.engine_config import KvEventsConfig
from .event_log import END_OF_REPLAY, SEQUENCE_BYTES, BatchQueue, EventBatch, EventLog, KvEventsError

log = structlog.get_logger("quipu.kv_events")

CLOSING_S = 0.5
"""How long `close` waits for subscribers to take the last batches."""
MAX_REQUEST_BYTES = 64
"""Longest frame on the replay socket, where a request has 8 bytes; peers that send more are disconnected."""


class EventPublisher:
    """Owns the sockets and their thread, from construction until `close`."""

    def __init__(self, config: KvEventsConfig, events: EventLog) -> None:
        """Open the sockets. Raises KvEventsError."""
        self._events = events
        self._rank = config.rank
        self._encoder = msgspec.msgpack.Encoder()
        self._topic = config.topic.encode()
        self._lock = threading.Lock()  # held for a copy of a queue at most
        self._queue = BatchQueue(buffer_steps=config.buffer_steps, max_queue_size=config.max_queue_size)
        self._has_dropped = False
        self._closing = False
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(config.hwm)
            self.endpoint = _open(self._pub, config.endpoint, binds=config.binds)
            """Bound address, with a wildcard port resolved; or the address it connects to."""
            self._router: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                # a ROUTER drops what exceeds this: a whole replay and its end have to fit
                self._router.set_hwm(config.buffer_steps + 1)
                self._router.maxmsgsize = MAX_REQUEST_BYTES
                self.replay_endpoint = _open(self._router, config.replay_endpoint, binds=True)
        except KvEventsError:
            self._context.destroy(linger=0)
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        log.info(
            "kv_events.open",
            endpoint=self.endpoint,
            binds=config.binds,
            replay_endpoint=self.replay_endpoint,
            topic=config.topic,
        )

    def flush(self) -> None:
        """Publish the changes since the last call as one batch, if there are any. Never waits for a socket."""
        events = self._events.take()
        if not events:
            return
        payload = self._encoder.encode(EventBatch(time.time(), events, self._rank))
        with self._lock:
            self._queue.append(payload)
            num_dropped = self._queue.num_dropped
        os.eventfd_write(self._wake, 1)
        if num_dropped and not self._has_dropped:
            self._has_dropped = True  # log it only once: more log lines would make an overload worse
            log.warning("kv_events.overflow", help="batches are produced faster than sent; subscribers must replay")

    def close(self) -> None:
        """Send what is left for a bounded time, and close the sockets, so that their addresses are free."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(4 * CLOSING_S)
            if not self._thread.is_alive():
                os.close(self._wake)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            if self._router is not None:
                poller.register(self._router, zmq.POLLIN)
            while not self._closing:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._send_unsent()
                if self._router is not None and self._router in ready:
                    self._replay(self._router)
            self._send_unsent()
        except Exception:
            log.exception("kv_events.failed", help="nothing is published until the engine restarts")
        finally:
            self._context.destroy(linger=round(CLOSING_S * 1000))

    def _send_unsent(self) -> None:
        with self._lock:
            batches = self._queue.take_unsent()
        for batch in batches:
            # never blocks: a PUB socket drops messages for subscribers beyond their high-water mark
            self._pub.send_multipart((self._topic, batch.sequence_bytes, batch.payload))

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer one replay request. Malformed requests are ignored."""
        frames = router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            log.debug("kv_events.no_request", num_frames=len(frames))
            return
        peer = frames[0]
        with self._lock:
            batches = self._queue.kept_from(int.from_bytes(frames[2], "big"))
        for batch in batches:
            router.send_multipart((peer, b"", self._topic, batch.sequence_bytes, batch.payload))
        router.send_multipart((peer, b"", b"", END_OF_REPLAY, b""))


def _open(socket: zmq.Socket[bytes], endpoint: str, *, binds: bool) -> str:
    try:
        if "[" in endpoint:
            socket.ipv6 = True
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise KvEventsError(f"cannot {'bind' if binds else 'connect to'} {endpoint}: {error.strerror}") from None
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0") if binds else endpoint
