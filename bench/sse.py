"""Measure what a streamed token costs the web side, and a bare Starlette application in the same run.

    python -m bench.sse [--json] [--quick] [--streams 1 16 64 256] [--seconds 3]

An engine that computes nothing produces one token per stream and step. The next step starts when the client has counted
every event of the last one: nothing is dropped, nothing accumulates, and every event is a separate write. Server and
client each have a core if there are two. `sse_quipu.py` is the real web side (application, HTTP server, accountant,
detokenizer); `sse_starlette.py` is the peer. Both use the same small protocol with the client, over a socket pair:

    server -> client   its port, once it listens
    client -> server   b"n": number of open streams?   b"t": processor time (ns)?   b"s": run a step
    server -> client   eight bytes, the answer to b"n" or b"t"
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

SERVERS = {"quipu": "bench.sse_quipu", "starlette": "bench.sse_starlette"}
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, CLIENT_CORE = CORES[0], CORES[-1]
PEER_NEEDS = ("starlette", "uvicorn", "uvloop", "httptools")
NO_PEER = "Starlette is not measured: `pip install -e '.[bench]'` installs what it needs"
PATIENCE_S = 30.0
WARM_UP_S = 0.3
EVENT = b"data: {"
HEADINGS = """\
                |         quipu          |       starlette        |
 streams tokens |   events/s    us/event |   events/s    us/event | ratio"""


class Speed(NamedTuple):
    events_per_s: float
    cpu_us_per_event: float


class Control:
    """The client's end of the socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE_S)

    def read_number(self) -> int:
        return int.from_bytes(self.sock.recv(8, socket.MSG_WAITALL), "little")

    def ask(self, question: bytes) -> int:
        self.sock.sendall(question)
        return self.read_number()


class Streams:
    """Open streams, read through one epoll."""

    def __init__(self, port: int, count: int) -> None:
        self._poll = select.epoll()
        self._tails: dict[int, bytes] = {}
        self._socks: dict[int, socket.socket] = {}
        body = json.dumps({"model": "demo", "prompt": "x", "stream": True, "max_tokens": 10**8}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            sock.setblocking(False)
            self._poll.register(sock, select.EPOLLIN)
            self._socks[sock.fileno()] = sock
            self._tails[sock.fileno()] = b""

    def read_events(self, count: int) -> None:
        """Return when `count` events have arrived, over all streams."""
        tails, socks = self._tails, self._socks
        deadline = time.monotonic() + PATIENCE_S
        while count > 0:
            ready = self._poll.poll(PATIENCE_S)
            if time.monotonic() > deadline:  # heartbeats may still come
                raise TimeoutError(f"{count} events did not arrive")
            for descriptor, _ in ready:
                data = socks[descriptor].recv(65536)
                if not data:
                    raise ConnectionError("a stream ended")
                data = tails[descriptor] + data  # an event may start at the end of the previous read
                count -= data.count(EVENT)
                tails[descriptor] = data[1 - len(EVENT) :]
        if count < 0:
            raise RuntimeError("more events arrived than were sent")

    def close(self) -> None:
        self._poll.close()
        for sock in self._socks.values():
            sock.close()


def measure(module: str, *, num_streams: int, detokenize: bool, seconds: float) -> Speed:
    """Start a server on its core and count events for `seconds`."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", module, str(theirs.fileno()), str(SERVER_CORE), "text" if detokenize else "plain"]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).resolve().parent.parent)
    theirs.close()
    with ours:
        control = Control(ours)
        streams = Streams(control.read_number(), num_streams)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while control.ask(b"n") < num_streams:
                if time.monotonic() > deadline:
                    raise TimeoutError("not every stream was opened")
                time.sleep(0.001)
            run_steps(control, streams, num_streams, min(WARM_UP_S, seconds))
            cpu_before, began = control.ask(b"t"), time.perf_counter()
            num_steps = run_steps(control, streams, num_streams, seconds)
            took, cpu = time.perf_counter() - began, control.ask(b"t") - cpu_before
        finally:
            streams.close()
    process.wait(PATIENCE_S)
    num_events = num_steps * num_streams
    return Speed(num_events / took, cpu / num_events / 1000)


def run_steps(control: Control, streams: Streams, num_streams: int, seconds: float) -> int:
    num_steps = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        control.sock.sendall(b"s")
        streams.read_events(num_streams)
        num_steps += 1
    return num_steps


def median(speeds: list[Speed]) -> Speed:
    return Speed(*(statistics.median(column) for column in zip(*speeds, strict=True)))


def has_peer() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in PEER_NEEDS)


def measure_row(
    names: list[str], *, num_streams: int, detokenize: bool, seconds: float, rounds: int
) -> dict[str, float | int | bool | None]:
    """Measure the servers alternately, so that other load on the machine affects all; return medians."""
    speeds: dict[str, list[Speed]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            speed = measure(SERVERS[name], num_streams=num_streams, detokenize=detokenize, seconds=seconds / rounds)
            speeds[name].append(speed)
    row: dict[str, float | int | bool | None] = {"streams": num_streams, "detokenize": detokenize}
    for name in SERVERS:
        usual = median(speeds[name]) if name in speeds else None
        row[f"{name}_events_per_s"] = None if usual is None else round(usual.events_per_s)
        row[f"{name}_cpu_us_per_event"] = None if usual is None else round(usual.cpu_us_per_event, 2)
    quipu, starlette = row["quipu_events_per_s"], row["starlette_events_per_s"]
    row["ratio"] = round(quipu / starlette, 3) if quipu and starlette else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sse", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: two streams, once")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=3.0, help="per server and row (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of turns into which that time is split (default: %(default)s)"
    )
    arguments = parser.parse_args()
    names = list(SERVERS)
    if not has_peer():
        names.remove("starlette")
        print(NO_PEER, file=sys.stderr)
    if arguments.quick:
        arguments.streams, arguments.seconds, arguments.rounds = [2], 0.05, 1
    os.sched_setaffinity(0, {CLIENT_CORE})
    rows = []
    if not arguments.json:
        print(HEADINGS)
    for detokenize in (True,) if arguments.quick else (False, True):
        for num_streams in arguments.streams:
            row = measure_row(
                names,
                num_streams=num_streams,
                detokenize=detokenize,
                seconds=arguments.seconds,
                rounds=arguments.rounds,
            )
            rows.append(row)
            if not arguments.json:
                print(
                    f"{num_streams:>8} {'text' if detokenize else 'plain':>6} | "
                    f"{row['quipu_events_per_s']!s:>10} {row['quipu_cpu_us_per_event']!s:>11} | "
                    f"{row['starlette_events_per_s']!s:>10} {row['starlette_cpu_us_per_event']!s:>11} | {row['ratio']}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
