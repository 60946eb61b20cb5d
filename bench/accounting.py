"""Measure what accounting costs: `quipu serve` compared with the same server and an accountant that keeps no accounts.

    python -m bench.accounting [--json] [--quick] [--pairs 10] [--streams 64] [--requests 512]

A fake executor takes 5 ms per step and computes nothing; 64 streams are open at any time until all requests are served.
The benchmark measures the processor time of both processes, web and engine, per token; starting and ending requests and
the ledger are included. Both servers run throughout. A pair is eight turns of a second or two in the order a b b a b a
a b, and the server that starts alternates between pairs, so that other load on the machine affects both. The result is
the median of the pairs' differences with a distribution-free confidence interval (order statistics).

`books` is the unchanged server; for `null` see `accounting_null.py`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from bench.http_load import free_port

ROOT = Path(__file__).resolve().parent.parent
STEP_S = 0.005
PROMPT_TOKENS = 48
SHARED_TOKENS = 32
PATIENCE_S = 120.0
KINDS = ("null", "books")


class Cost(NamedTuple):
    web_us: float
    """Processor time of the web process per token."""
    engine_us: float
    tokens_per_s: float

    @property
    def us(self) -> float:
        return self.web_us + self.engine_us


class Interval(NamedTuple):
    low: float
    high: float
    confidence: float


class Work(NamedTuple):
    body: bytes
    num_tokens: int


def make_work(num_requests: int, seed: int, lengths: tuple[int, int] = (64, 192)) -> list[Work]:
    """Make greedy streams: prompts of two cached blocks and one of their own; output lengths within `lengths`."""
    rng = random.Random(seed)
    shared = rng.choices(range(300, 3000), k=SHARED_TOKENS)
    work = []
    for _ in range(num_requests):
        num_tokens = rng.randint(*lengths)
        prompt = shared + rng.choices(range(300, 3000), k=PROMPT_TOKENS - SHARED_TOKENS)
        fields = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        work.append(Work(json.dumps(fields | {"stream": True}).encode(), num_tokens))
    return work


def serve_all(port: int, work: list[Work], num_streams: int) -> int:
    """Send all requests, `num_streams` at a time, read the responses to the end and return the number of tokens."""
    poll, tails, socks = select.epoll(), {}, {}
    waiting = list(reversed(work))

    def open_one() -> None:
        body = waiting.pop().body
        sock = socket.create_connection(("127.0.0.1", port))
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\n"
        )
        sock.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        sock.setblocking(False)
        poll.register(sock, select.EPOLLIN)
        socks[sock.fileno()], tails[sock.fileno()] = sock, b""

    for _ in range(min(num_streams, len(work))):
        open_one()
    deadline = time.monotonic() + PATIENCE_S
    while socks:
        for descriptor, _ in poll.poll(PATIENCE_S):
            data = socks[descriptor].recv(65536)
            tail = tails[descriptor] = (tails[descriptor] + data)[-64:]
            if b"data: [DONE]" not in tail:
                if not data:
                    raise ConnectionError(f"a stream was not served: {tail!r}")
                continue
            poll.unregister(descriptor)
            socks.pop(descriptor).close()
            if waiting:
                open_one()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(socks)} streams have not ended")
    poll.close()
    return sum(one.num_tokens for one in work)


def processor_s(pid: int) -> float:
    """Return the processor time of a whole process, ended threads included (Linux: another process's CPU clock)."""
    return time.clock_gettime((~pid << 3) | 2)


class Server:
    """A server process with its own data folder."""

    def __init__(self, kind: str, data_dir: str, flags: list[str]) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "bench.accounting_null", kind, "--executor", "fake", "--log-level", "warning"]
        command += ["--fake-step-seconds", str(STEP_S), "--port", str(self.port), "--data-dir", data_dir, *flags]
        self.process = subprocess.Popen(command, cwd=ROOT)
        self._wait_ready()
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        (engine_pid,) = [
            pid
            for pid in pids
            if b"quipu.actors.fleet.processes.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        self.pids = (self.process.pid, engine_pid)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        raise RuntimeError("the server did not become ready")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)


def measure_pair(
    servers: dict[str, Server], *, first: str, num_streams: int, num_requests: int, lengths: tuple[int, int], seed: int
) -> dict[str, Cost]:
    """Measure one pair: both servers take turns with the same work."""
    second = next(kind for kind in servers if kind != first)
    order = [first, second, second, first, second, first, first, second]
    spent = {kind: [0.0, 0.0, 0.0, 0.0] for kind in servers}  # web, engine, wall, tokens
    num_turns = dict.fromkeys(servers, 0)
    for kind in order:
        server, totals = servers[kind], spent[kind]
        work = make_work(max(1, 2 * num_requests // len(order)), 100 * seed + num_turns[kind], lengths)
        num_turns[kind] += 1
        before, began = [processor_s(pid) for pid in server.pids], time.perf_counter()
        totals[3] += serve_all(server.port, work, num_streams)
        totals[2] += time.perf_counter() - began
        for index, pid in enumerate(server.pids):
            totals[index] += processor_s(pid) - before[index]
    return {k: Cost(1e6 * web / n, 1e6 * engine / n, n / wall) for k, (web, engine, wall, n) in spent.items()}


def median_interval(values: list[float]) -> Interval:
    """Return the tightest pair of order statistics that contains the median with 95 % confidence, or the outermost."""
    ordered, n = sorted(values), len(values)
    best = Interval(ordered[0], ordered[-1], 1 - 2 * 0.5**n)
    for k in range(1, n // 2):
        outside = 2 * sum(math.comb(n, i) for i in range(k + 1)) * 0.5**n
        if 1 - outside < 0.95:
            break
        best = Interval(ordered[k], ordered[n - 1 - k], 1 - outside)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.accounting", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quick", action="store_true", help="smoke test: one pair, a few short streams")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512, help="per server and pair (default: %(default)s)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags for both servers")
    arguments = parser.parse_args()
    lengths = (64, 192)
    if arguments.quick:
        arguments.pairs, arguments.streams, arguments.requests, lengths = 1, 4, 8, (4, 8)
    pairs: list[dict[str, Cost]] = []
    with ExitStack() as stack:
        servers = {}
        for kind in KINDS:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            servers[kind] = Server(kind, folder, arguments.flags)
            stack.callback(servers[kind].stop)
            serve_all(servers[kind].port, make_work(2 * arguments.streams, -1, lengths), arguments.streams)  # warm
        for number in range(arguments.pairs):
            pair = measure_pair(
                servers,
                first=KINDS[number % 2],
                num_streams=arguments.streams,
                num_requests=arguments.requests,
                lengths=lengths,
                seed=number,
            )
            pairs.append(pair)
            if not arguments.json:
                print(_line(number, pair), flush=True)
    differences = [pair["books"].us / pair["null"].us - 1 for pair in pairs]
    interval = median_interval(differences)
    summary = {
        "difference": round(statistics.median(differences), 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "confidence": round(interval.confidence, 4),
        "load_1min": os.getloadavg()[0],
    }
    for kind in KINDS:
        summary[f"{kind}_us_per_token"] = round(statistics.median(pair[kind].us for pair in pairs), 2)
    if arguments.json:
        print(json.dumps({"pairs": [{k: c._asdict() for k, c in p.items()} for p in pairs], **summary}))
    else:
        print(
            f"median difference {summary['difference']:+.1%}, "
            f"between {summary['low']:+.1%} and {summary['high']:+.1%} ({summary['confidence']:.0%}); "
            f"us a token: null {summary['null_us_per_token']}, books {summary['books_us_per_token']}; "
            f"load {summary['load_1min']:.1f}"
        )


def _line(number: int, pair: dict[str, Cost]) -> str:
    parts = [f"{k} web {c.web_us:6.2f} engine {c.engine_us:6.2f} ({c.tokens_per_s:6.0f}/s)" for k, c in pair.items()]
    return f"{number:>3} | " + " | ".join(sorted(parts)) + f" | {pair['books'].us / pair['null'].us - 1:+.1%}"


if __name__ == "__main__":
    main()
