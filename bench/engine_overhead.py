"""Measure what everything around the executor adds to a step, over HTTP: scheduler, block manager, channels, processes.

    python -m bench.engine_overhead [--json] [--quick] [--rounds 3] [--model FOLDER]

A whole server runs with dummy weights in the shape of Qwen3-0.6B; clients stream. The executor's time is that of the
backend's call, measured in the engine process; the period of a step is the time that clients see between two tokens of
a stream, over the same steps. `overhead_N` is how much longer the period is, as a fraction of the step, with N streams.
`first_token_warm_1024` is the time to first token of a cached prompt of 1,024 tokens minus one decode step of the same
stream. Both are medians of the rounds: other load on the machine lengthens step and period alike, or affects one round.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from bench.http_load import Answer, ask_all, completion
from bench.peers.checkpoint import make_checkpoint
from bench.peers.servers import HOME
from bench.spans import Span, read_spans
from bench.timed_server import MODEL, TimedServer
from quipu.actors.shared.checkpoint import DEMO

LIMITS = {"overhead_1": 0.04, "overhead_8": 0.04, "first_token_warm": 8.0}


@attrs.frozen
class Period:
    """Durations of the steps of one load, in seconds."""

    num_streams: int
    period_s: float
    """Between two tokens of a stream, as the client sees them."""
    step_s: float
    """Of the executor alone."""
    gap_s: float
    """From the end of one step to the start of the next."""

    @property
    def overhead(self) -> float:
        return self.period_s / self.step_s - 1


def period_of(answers: Sequence[Answer], steps: Sequence[Span]) -> Period:
    """Compute the period from the tokens of concurrently decoding streams and the steps that produced them."""
    begin_s = max(answer.tokens_s[0] for answer in answers)
    end_s = min(answer.tokens_s[-1] for answer in answers)
    seen = [at_s for at_s in answers[0].tokens_s if begin_s <= at_s <= end_s]
    inside = [step for step in steps if begin_s <= step.start_s and step.end_s <= end_s and step.size == len(answers)]
    if len(inside) < 2 or len(seen) < 2:
        raise ValueError("the streams never decoded at the same time: use longer outputs")
    gaps = [later.start_s - earlier.end_s for earlier, later in pairwise(inside)]
    return Period(
        len(answers),
        period_s=(seen[-1] - seen[0]) / (len(seen) - 1),
        step_s=statistics.fmean(step.seconds for step in inside),
        gap_s=statistics.fmean(gaps),
    )


def measure(model: Path, flags: Sequence[str], *, rounds: int, num_tokens: int, long_prompt: int) -> dict[str, Any]:
    """Run every load on one server, in alternation."""
    draw = random.Random(0)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]

    def prompt(length: int) -> list[int]:
        return draw.choices(range(min(1000, vocabulary // 2), vocabulary), k=length)

    loads: dict[int, list[list[Answer]]] = {1: [], 8: []}
    warm: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        with TimedServer(model, Path(folder), *flags) as server:
            for number in range(rounds + 1):  # the first is the warm-up
                for num_streams, seen in loads.items():
                    bodies = [completion(MODEL, prompt(64), num_tokens) for _ in range(num_streams)]
                    seen.append(ask_all(server.port, bodies))
                body = completion(MODEL, prompt(long_prompt), 8)
                ask_all(server.port, [body])
                (answer,) = ask_all(server.port, [body])
                later_s = (answer.tokens_s[-1] - answer.tokens_s[0]) / (len(answer.tokens_s) - 1)
                if number > 0:
                    warm.append((answer.first_token_s, later_s))
        steps = [span for span in read_spans(Path(folder)) if span.name == "step"]
    periods = [period_of(answers, steps) for seen in loads.values() for answers in seen[1:]]
    return describe(periods, warm, long_prompt)


def describe(periods: Sequence[Period], warm: Sequence[tuple[float, float]], long_prompt: int) -> dict[str, Any]:
    """Return the rows, with their parts in milliseconds."""
    rows = []
    for num_streams in sorted({period.num_streams for period in periods}):
        some = [period for period in periods if period.num_streams == num_streams]
        parts = {
            f"{name}_ms": statistics.median(getattr(period, f"{name}_s") for period in some) * 1000
            for name in ("period", "step", "gap")
        }
        value = statistics.median(period.overhead for period in some)
        name = f"overhead_{num_streams}"
        rows.append({"name": name, "value": value, "unit": "of a step", "limit": LIMITS.get(name), **parts})
    value = statistics.median((first_s - step_s) * 1000 for first_s, step_s in warm)
    parts = {
        "first_token_ms": statistics.median(first_s for first_s, _ in warm) * 1000,
        "step_ms": statistics.median(step_s for _, step_s in warm) * 1000,
    }
    limit = LIMITS["first_token_warm"]
    name = f"first_token_warm_{long_prompt}"
    rows.append({"name": name, "value": value, "unit": "ms beyond a step", "limit": limit, **parts})
    return {"rows": rows}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise servers would outlive this process
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine_overhead", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: the demo model, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a checkpoint (default: that of bench.peers, created if missing)")
    arguments, flags = parser.parse_known_args()
    if arguments.quick:
        arguments.model = arguments.model or DEMO
    model = arguments.model or make_checkpoint(HOME / "qwen3-0.6b-random")
    rounds, num_tokens, long_prompt = (1, 200, 64) if arguments.quick else (arguments.rounds, 128, 1024)
    report = measure(model, flags, rounds=rounds, num_tokens=num_tokens, long_prompt=long_prompt)
    if arguments.json:
        print(json.dumps(report))
        return
    for row in report["rows"]:
        parts = ", ".join(f"{name[:-3]} {value:.3f} ms" for name, value in row.items() if name.endswith("_ms"))
        print(f"{row['name']:24} {row['value']:8.3f} {row['unit']} (at most {row['limit']}): {parts}")


if __name__ == "__main__":
    main()
