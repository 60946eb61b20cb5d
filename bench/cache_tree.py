"""What reading the prefix tree (`GET /v1/cache/tree`) costs the engine whose blocks it shows, and how soon it is drawn.

    python -m bench.cache_tree [--blocks 100000] [--streams 8] [--rounds 5] [--every 1] [--json]
    python -m bench.cache_tree --quick [--json]

A whole server on the fake executor gets prompts until its pool is full. Then streams decode: in each round alone, while
a client asks for the whole tree `--every` second, and alone again. The engine is timed: `step_ms` is the time from the
start of a step to the start of the next one, `work_us` what scheduler and block manager take of it. A ratio is what
they are while the tree is read, divided by the mean of what they are otherwise: the median of all rounds. `noise` is
the same of the two phases alone: how far from 1 other load on the machine brings a ratio. At last a browser loads the
cache explorer (`/ui/#cache`): `first_paint` says when it is on the screen.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from bench.first_paint import first_paint
from bench.http_load import ask_all, completion
from bench.spans import Span, read_spans
from bench.timed_server import MODEL, TimedServer
from bench.trace_replay import positive
from quipu.actors.shared.checkpoint import DEMO

BLOCK = 16
PROMPT_TOKENS = 1600
SHARED_TOKENS = 800
NUM_CONVERSATIONS = 40
"""Beginnings that prompts share."""
STEP_S = 0.01
TREE = "/v1/cache/tree?limit=2000&depth=1000"
AT_ONCE = 16
PAINTED = "quipu.cache.painted"
"""What the page marks when the tree is on the screen."""


@attrs.define
class Reader:
    """A client that asks for the tree again and again."""

    url: str
    every_s: float
    num_answers: int = 0
    last_answer: bytes = b""
    slowest_s: float = 0.0
    _is_done: threading.Event = attrs.field(factory=threading.Event)

    def ask(self) -> None:
        began = time.perf_counter()
        with urllib.request.urlopen(self.url, timeout=60) as response:
            self.last_answer = response.read()
        self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
        self.num_answers += 1

    def run(self) -> None:
        self.ask()
        while not self._is_done.wait(self.every_s):
            self.ask()

    @contextmanager
    def asking(self) -> Iterator[None]:
        self._is_done.clear()
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._is_done.set()
            thread.join()


@attrs.frozen
class Phase:
    begin_s: float
    end_s: float
    kind: int
    """Its place in a round."""


READ = 1
"""The place of the phase in which the tree is read."""


def fill(port: int, num_blocks: int) -> int:
    """Send prompts until the pool must be full; return their number."""
    rng = random.Random(3)
    heads = [[rng.randrange(300, 3000) for _ in range(SHARED_TOKENS)] for _ in range(NUM_CONVERSATIONS)]
    own = PROMPT_TOKENS - SHARED_TOKENS
    num_prompts = -(-num_blocks * BLOCK // own)
    for start in range(0, num_prompts, AT_ONCE):
        prompts = [
            rng.choice(heads) + [rng.randrange(300, 3000) for _ in range(own)]
            for _ in range(min(AT_ONCE, num_prompts - start))
        ]
        ask_all(port, [completion(MODEL, prompt, 1) for prompt in prompts])
    return num_prompts


def measure(num_blocks: int, num_streams: int, num_tokens: int, rounds: int, every_s: float) -> dict[str, Any]:
    phases: list[Phase] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--executor", "fake", "--fake-step-seconds", str(STEP_S), "--num-blocks", str(num_blocks + 1)]
        flags += ["--max-num-batched-tokens", "65536", "--block-size", str(BLOCK)]
        with TimedServer(DEMO, folder, *flags) as server:
            num_prompts = fill(server.port, num_blocks)
            reader = Reader(f"http://127.0.0.1:{server.port}{TREE}", every_s)
            reader.ask()
            bodies = [completion(MODEL, [300 + i] * 40, num_tokens) for i in range(num_streams)]
            for _ in range(rounds):
                for kind in range(3):
                    begin_s = time.perf_counter()
                    if kind == READ:
                        with reader.asking():
                            ask_all(server.port, bodies)
                    else:
                        ask_all(server.port, bodies)
                    phases.append(Phase(begin_s, time.perf_counter(), kind))
            painted = first_paint(f"http://127.0.0.1:{server.port}", "cache", PAINTED, rounds)
        spans = read_spans(folder)
    kinds = [[steps_of(spans, phase, num_streams) for phase in phases if phase.kind == kind] for kind in range(3)]
    rows = [row_of(name, pick, kinds) for name, pick in (("step_ms", 0), ("work_us", 1))]
    return {
        "blocks": num_blocks,
        "prompts": num_prompts,
        "answers": reader.num_answers,
        "nodes": len(json.loads(reader.last_answer)["nodes"]),
        "bytes": len(reader.last_answer),
        "slowest_answer_ms": round(1000 * reader.slowest_s, 1),
        "rows": rows,
        "first_paint": painted,
    }


def steps_of(spans: Sequence[Span], phase: Phase, num_streams: int) -> tuple[list[float], list[float]]:
    """Return, of a phase's decoding steps, the milliseconds between two, and the microseconds of work for each."""
    inside = [span for span in spans if phase.begin_s <= span.start_s and span.end_s <= phase.end_s]
    steps = [span for span in inside if span.name == "step" and span.size == num_streams]
    work = sorted((s.start_s, s.end_s - s.start_s) for s in inside if s.name in ("match", "schedule"))
    periods, works, at = [], [], 0
    for before, after in pairwise(sorted(steps, key=lambda span: span.start_s)):
        total = 0.0
        while at < len(work) and work[at][0] < after.start_s:
            total += work[at][1] * (work[at][0] >= before.start_s)
            at += 1
        periods.append(1000 * (after.start_s - before.start_s))
        works.append(1e6 * total)
    return periods, works


def row_of(name: str, pick: int, kinds: Sequence[Sequence[tuple[list[float], list[float]]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"of": name}
    for share, what in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
        before, read, after = ([_quantile(phase[pick], share) for phase in phases] for phases in kinds)
        alone = [statistics.mean(pair) for pair in zip(before, after, strict=True)]
        row[f"{what}_alone"], row[f"{what}_read"] = (round(statistics.median(part), 3) for part in (alone, read))
        row[f"{what}_ratio"], row[f"{what}_noise"] = _ratio(read, alone), _ratio(after, before)
    return row


def _ratio(values: Sequence[float], to: Sequence[float]) -> float | None:
    ratios = [value / other for value, other in zip(values, to, strict=True) if other]
    return round(statistics.median(ratios), 3) if ratios else None


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cache_tree", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=positive, default=100_000, help="in the pool (default: %(default)s)")
    parser.add_argument("--streams", type=positive, default=8, help="that decode (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=300, help="of a stream (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="(default: %(default)s)")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="smoke test: a small pool, once")
    parser.add_argument("--json", action="store_true", help="print the object on one line")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.blocks, arguments.tokens, arguments.rounds = 1000, 20, 1
    report = measure(arguments.blocks, arguments.streams, arguments.tokens, arguments.rounds, arguments.every)
    print(json.dumps(report, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
