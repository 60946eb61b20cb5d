"""Measure what a streamed token costs the web side, and a bare Starlette application in the same run.

    python -m bench.sse [--json] [--quick] [--streams 1 16 64 256] [--seconds 3]
    python -m bench.sse --engines 4 [--json] [--quick] [--streams 256] [--seconds 12] [--rounds 12]

An engine that computes nothing produces one token per stream and step. The next step starts when the client has counted
every event of the last one: nothing is dropped, nothing accumulates, and every event is a separate write. Server and
client each have a core if there are two. `sse_quipu.py` is the real web side (application, HTTP server, accountant,
detokenizer); `sse_starlette.py` is the peer. Both use the same small protocol with the client, over a socket pair (one
for each engine, if there are several):

    server -> client   its port, once it listens
    client -> server   b"n": number of open streams?   b"t": processor time (ns)?   b"s": run a step
    server -> client   eight bytes, the answer to b"n" or b"t"

With `--engines`, the web side with one engine is compared to the same with several, which share the streams evenly.
`together`: all engines run a step at once, and the next when all of its events have arrived, like the single engine.
`by turns`: one runs a step, then the next; so no two reports ever wait at the same time.
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
from functools import partial
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

ENGINES_HEADINGS = """\
                |       one engine       |          several, together          |          several, by turns
 streams tokens |   events/s    us/event |   events/s    us/event ratio    cpu |   events/s    us/event ratio    cpu"""
TOGETHER, BY_TURNS = "together", "by_turns"
TURNS = 6
"""How often a pair of servers is measured alternately before another pair is started."""


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


class Server:
    """A server on its core, and the streams that it was opened with. A context manager."""

    def __init__(self, module: str, *, num_streams: int, detokenize: bool, num_engines: int = 1) -> None:
        pairs = [socket.socketpair() for _ in range(num_engines)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        mode = "text" if detokenize else "plain"
        command = [sys.executable, "-m", module, ",".join(map(str, descriptors)), str(SERVER_CORE), mode]
        self._process = subprocess.Popen(command, pass_fds=descriptors, cwd=Path(__file__).resolve().parent.parent)
        self._controls = [Control(ours) for ours, _ in pairs]
        for _, theirs in pairs:
            theirs.close()
        self._num_streams = num_streams
        self._streams = Streams(self._controls[0].read_number(), num_streams)
        deadline = time.monotonic() + PATIENCE_S
        while sum(counts := [control.ask(b"n") for control in self._controls]) < num_streams:
            if time.monotonic() > deadline:
                raise TimeoutError("not every stream was opened")
            time.sleep(0.001)
        if max(counts) - min(counts) > 1:
            raise RuntimeError(f"the engines have different numbers of streams: {counts}")
        self._num_of_each = counts

    def measure(self, seconds: float, order: str = TOGETHER) -> Speed:
        """Count events for `seconds`."""
        asked = self._controls[0]
        cpu_before, began = asked.ask(b"t"), time.perf_counter()
        num_events = self._run_steps(seconds, order) * self._num_streams
        took, cpu = time.perf_counter() - began, asked.ask(b"t") - cpu_before
        return Speed(num_events / took, cpu / num_events / 1000)

    def _run_steps(self, seconds: float, order: str) -> int:
        """Run steps of all engines for `seconds`, and return how many."""
        controls, streams = self._controls, self._streams
        if order == TOGETHER:
            turns = [(controls, self._num_streams)]
        else:
            turns = [([control], count) for control, count in zip(controls, self._num_of_each, strict=True)]
        num_steps = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for asked, num_events in turns:
                for control in asked:
                    control.sock.sendall(b"s")
                streams.read_events(num_events)
            num_steps += 1
        return num_steps

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.close()
        for control in self._controls:
            control.sock.close()
        self._process.wait(PATIENCE_S)


def measure(module: str, *, num_streams: int, detokenize: bool, seconds: float) -> Speed:
    """Start a server and count events for `seconds`."""
    with Server(module, num_streams=num_streams, detokenize=detokenize) as server:
        server.measure(min(WARM_UP_S, seconds))
        return server.measure(seconds)


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


def compare_engines(
    num_engines: int, *, num_streams: int, detokenize: bool, seconds: float, rounds: int
) -> dict[str, float | int | bool]:
    """Run a server with one engine beside one with several, and measure them alternately; start both anew each round.

    Return medians, and the medians of the rounds' ratios: some processes are a fifth slower than others for as long as
    they run, so that one pair says little.
    """
    speeds: dict[str, list[Speed]] = {"one": [], TOGETHER: [], BY_TURNS: []}
    start = partial(Server, SERVERS["quipu"], num_streams=num_streams, detokenize=detokenize)
    slice_s = seconds / rounds / TURNS
    for _ in range(rounds):
        of_round: dict[str, list[Speed]] = {name: [] for name in speeds}
        with start() as one, start(num_engines=num_engines) as several:
            variants = [("one", one, TOGETHER), (TOGETHER, several, TOGETHER), (BY_TURNS, several, BY_TURNS)]
            for _, server, order in variants:
                server.measure(min(WARM_UP_S, seconds), order)
            for turn in range(TURNS):
                for name, server, order in variants if turn % 2 else reversed(variants):
                    server.measure(slice_s, order)  # after a turn of the other, a server is slower for a while
                    of_round[name].append(server.measure(slice_s, order))
        for name, measured in of_round.items():
            speeds[name].append(median(measured))
    row: dict[str, float | int | bool] = {"streams": num_streams, "detokenize": detokenize, "engines": num_engines}
    for name, measured in speeds.items():
        usual = median(measured)
        row[f"{name}_events_per_s"] = round(usual.events_per_s)
        row[f"{name}_cpu_us_per_event"] = round(usual.cpu_us_per_event, 2)
        if name != "one":
            pairs = list(zip(measured, speeds["one"], strict=True))
            row[f"{name}_ratio"] = round(statistics.median(a.events_per_s / b.events_per_s for a, b in pairs), 3)
            # processor time: the less, the better, so that this one is turned over, too
            row[f"{name}_cpu_ratio"] = round(
                statistics.median(b.cpu_us_per_event / a.cpu_us_per_event for a, b in pairs), 3
            )
    return row


def print_engines(row: dict[str, float | int | bool]) -> None:
    cells = [f"{row['streams']:>8} {'text' if row['detokenize'] else 'plain':>6}"]
    for name in ("one", TOGETHER, BY_TURNS):
        cell = f"{row[f'{name}_events_per_s']:>10} {row[f'{name}_cpu_us_per_event']:>11}"
        cells.append(cell if name == "one" else f"{cell} {row[f'{name}_ratio']:>5} {row[f'{name}_cpu_ratio']:>6}")
    print(" | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sse", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: two streams, once")
    parser.add_argument(
        "--engines", type=int, metavar="N", help="compare the web side of one engine with that of N, without the peer"
    )
    parser.add_argument("--streams", type=int, nargs="+", help="(default: 1 16 64 256; 256 with --engines)")
    parser.add_argument("--seconds", type=float, help="per server and row (default: 3; 12 with --engines)")
    parser.add_argument(
        "--rounds", type=int, help="how often the servers are started in that time (default: 3; 12 with --engines)"
    )
    arguments = parser.parse_args()
    if arguments.streams is None:
        arguments.streams = [256] if arguments.engines else [1, 16, 64, 256]
    if arguments.seconds is None:
        arguments.seconds = 12.0 if arguments.engines else 3.0
    if arguments.rounds is None:
        arguments.rounds = 12 if arguments.engines else 3
    names = list(SERVERS)
    if not arguments.engines and not has_peer():
        names.remove("starlette")
        print(NO_PEER, file=sys.stderr)
    if arguments.quick:
        arguments.streams, arguments.seconds, arguments.rounds = [arguments.engines or 2], 0.05, 1
    os.sched_setaffinity(0, {CLIENT_CORE})
    rows: list[dict[str, float | int | bool | None]] = []
    if not arguments.json:
        print(ENGINES_HEADINGS if arguments.engines else HEADINGS)
    for detokenize in (True,) if arguments.quick else (False, True):
        for num_streams in arguments.streams:
            if arguments.engines:
                compared = compare_engines(
                    arguments.engines,
                    num_streams=num_streams,
                    detokenize=detokenize,
                    seconds=arguments.seconds,
                    rounds=arguments.rounds,
                )
                rows.append({**compared})
                if not arguments.json:
                    print_engines(compared)
                continue
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
