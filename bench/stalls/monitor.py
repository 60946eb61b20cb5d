"""What the other clients see: streams that must continue, and a `/health` that must respond.

A `Monitor` is a separate process, so that delays of the benchmark are not attributed to the server. It runs its streams
and its probe in one thread, on plain sockets and one epoll, so its own overhead is small and the same in every row. It
never sends anything that could delay the server.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import select
import socket
import threading
import time
from multiprocessing.connection import Connection

import attrs

from bench.http_load import request_of

PROBE_EVERY_S = 0.010
STREAM_TOKENS = 150
"""Per stream; then another one replaces it."""
STALLED_S = 20.0
"""A stream or probe that has been silent this long counts with this time, and is reconnected."""
_PROBE = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@attrs.frozen
class Waits:
    """The longest waits of one period, in seconds."""

    gap_s: float
    """Between two events of one stream."""
    health_s: float
    """From a probe to its response."""


@attrs.define(eq=False)
class _Stream:
    sock: socket.socket
    last_s: float
    has_begun: bool = False
    """Whether its first token has arrived; until then the wait is the scheduler's."""
    tail: bytes = b""


class Monitor:
    """Runs streams and a probe while its block is entered."""

    def __init__(self, port: int, num_streams: int) -> None:
        context = multiprocessing.get_context("fork")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(port, num_streams, self._link, theirs), daemon=True)
        self._theirs = theirs

    def __enter__(self) -> Monitor:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._process.join()

    def begin(self, probe: bytes | None = None) -> None:
        """Discard what was measured so far; pending waits count from now on.

        `probe`: a request to send instead of the one for `/health`; its response must come in one piece.
        """
        self._link.send(_PROBE if probe is None else probe)
        self._link.recv()

    def end(self) -> Waits:
        """Return the longest waits since `begin`, pending ones included."""
        self._link.send(None)
        waits: Waits = self._link.recv()
        return waits


def _watch(port: int, num_streams: int, theirs: Connection, link: Connection) -> None:
    """Run the process until the other end closes."""
    theirs.close()
    gc.disable()
    with _Watch(port, num_streams) as watch:
        while True:
            try:
                probe = link.recv()
            except EOFError:
                return
            if probe is not None:
                watch.begin(probe)
                link.send(None)
            else:
                link.send(watch.end())


class _Watch:
    """Runs the streams and the probe in a thread."""

    def __init__(self, port: int, num_streams: int, model: str = "demo") -> None:
        self._port = port
        prompt = {"model": model, "prompt": "Say something.", "max_tokens": STREAM_TOKENS, "stream": True}
        self._request = request_of(port, prompt | {"ignore_eos": True, "temperature": 1})
        self._num_streams = num_streams
        self._poll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self._probe_request = _PROBE
        self._probe: socket.socket | None = None
        self._probed_s: float | None = None
        self._gap_s = self._health_s = 0.0
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def begin(self, probe: bytes) -> None:
        with self._lock:
            self._probe_request = probe
            self._gap_s = self._health_s = 0.0
            now_s = time.perf_counter()
            for stream in self._streams.values():
                stream.last_s = now_s
            if self._probed_s is not None:
                self._probed_s = now_s

    def end(self) -> Waits:
        with self._lock:
            now_s = time.perf_counter()
            gaps = [now_s - stream.last_s for stream in self._streams.values() if stream.has_begun]
            health_s = 0.0 if self._probed_s is None else now_s - self._probed_s
            return Waits(max(self._gap_s, *gaps, 0.0), max(self._health_s, health_s))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        next_probe_s = time.perf_counter()
        while not self._ending.is_set():
            now_s = time.perf_counter()
            with self._lock:
                self._renew(now_s)
                if now_s >= next_probe_s and self._probed_s is None:
                    self._send_probe(now_s)
                    next_probe_s = max(next_probe_s + PROBE_EVERY_S, now_s)
            ready = self._poll.poll(0.005)
            now_s = time.perf_counter()
            with self._lock:
                for descriptor, _ in ready:
                    self._read(descriptor, now_s)
        for stream in self._streams.values():
            stream.sock.close()
        if self._probe is not None:
            self._probe.close()
        self._poll.close()

    def _renew(self, now_s: float) -> None:
        for descriptor, stream in list(self._streams.items()):
            if now_s - stream.last_s > STALLED_S:
                if stream.has_begun:
                    self._gap_s = max(self._gap_s, now_s - stream.last_s)
                self._drop(descriptor)
        if self._probed_s is not None and now_s - self._probed_s > STALLED_S:
            self._health_s = max(self._health_s, now_s - self._probed_s)
            self._drop_probe()
        while len(self._streams) < self._num_streams:
            sock = self._connect(self._request)
            if sock is None:
                return
            self._streams[sock.fileno()] = _Stream(sock, now_s)

    def _connect(self, request: bytes) -> socket.socket | None:
        sock = socket.socket()
        try:
            sock.settimeout(0.5)
            sock.connect(("127.0.0.1", self._port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(request)
        except OSError:
            sock.close()
            return None
        sock.setblocking(False)
        self._poll.register(sock, select.EPOLLIN)
        return sock

    def _send_probe(self, now_s: float) -> None:
        if self._probe is None:
            self._probe = self._connect(self._probe_request)
            self._probed_s = now_s
            return
        try:
            self._probe.sendall(self._probe_request)
            self._probed_s = now_s
        except OSError:
            self._drop_probe()

    def _read(self, descriptor: int, now_s: float) -> None:
        if self._probe is not None and descriptor == self._probe.fileno():
            self._read_probe(self._probe, now_s)
            return
        stream = self._streams.get(descriptor)
        if stream is None:
            return
        try:
            data = stream.sock.recv(1 << 16)
        except OSError:
            data = b""
        if b"data: " in data:
            if stream.has_begun:
                self._gap_s = max(self._gap_s, now_s - stream.last_s)
            stream.has_begun, stream.last_s = True, now_s
        stream.tail = (stream.tail + data)[-32:]
        if not data or b"[DONE]" in stream.tail:
            self._drop(descriptor)

    def _read_probe(self, probe: socket.socket, now_s: float) -> None:
        try:
            data = probe.recv(1 << 16)
        except OSError:
            data = b""
        if self._probed_s is not None:
            self._health_s = max(self._health_s, now_s - self._probed_s)
            self._probed_s = None
        if not data:
            self._drop_probe()

    def _drop(self, descriptor: int) -> None:
        stream = self._streams.pop(descriptor)
        self._poll.unregister(descriptor)
        stream.sock.close()

    def _drop_probe(self) -> None:
        if self._probe is not None:
            self._poll.unregister(self._probe)
            self._probe.close()
        self._probe = self._probed_s = None


def health_of(port: int, within_s: float = 5.0) -> dict[str, object] | None:
    """Return the JSON of `/health`, requested on a new connection; None if there was no response."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=within_s) as sock:
            sock.sendall(_PROBE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            answer = b""
            while data := sock.recv(1 << 16):
                answer += data
        body: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])
    except (OSError, ValueError):
        return None
    return body
