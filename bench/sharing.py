"""Measure the benefit of having a new sequence wait for a prefix that another one is computing.

    python -m bench.sharing [--json] [--step-ms 10] [--token-us 20]

The real scheduler and block manager serve the same requests three times, in virtual time: no sequence waits (`off`);
every sequence waits that is delayed by at most two steps (`always`); and by the server's rule (`rule`, see
`actors/engine/block_manager/pending.py`). A pass takes `--step-ms` and `--token-us` for each position that it computes.

A workload consists of bursts of requests with a common prefix and different suffixes. `prompt tokens` are those
computed; a request's time to first token starts at its arrival, `last token` at the first arrival of all. `us/step` is
wall time in scheduler and block manager: the cost of the waiting itself.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import deque
from typing import Any

import attrs

from bench.engine_jobs import quiet_collector
from bench.simulated import Job, PassCosts, SimulatedEngine
from quipu.actors.engine.block_manager.pending import STEP_OVERHEAD_TOKENS
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.scheduler import StepDone
from quipu.actors.shared.block_keys import chain_keys

BLOCK_SIZE = 16
NUM_BLOCKS = 100_000
NUM_BATCHED_TOKENS = 2048
"""The server's default."""
VOCABULARY = 128_000
ROOT = bytes(32)


@attrs.frozen
class Workload:
    """`num_bursts` bursts of `burst` requests, `every_s` apart."""

    burst: int
    num_shared: int
    """Prompt tokens that the requests of one burst share."""
    num_own: int = 64
    """Prompt tokens after those, different for each request."""
    num_bursts: int = 1
    every_s: float = 0.0
    num_outputs: int = 32
    num_decoding: int = 0
    """Sequences that decode throughout."""
    max_chunk: int = 0
    """`--long-prefill-token-threshold`."""

    @property
    def name(self) -> str:
        words = f"{self.burst} x ({self.num_shared} shared + {self.num_own})"
        if self.num_bursts > 1:
            words = f"{self.num_bursts} times {words}, {self.every_s * 1000:g} ms apart"
        if self.num_decoding:
            words += f", {self.num_decoding} decoding"
        if self.max_chunk:
            words += f", chunks of {self.max_chunk}"
        return words


WORKLOADS = [
    *(Workload(burst, num_shared) for num_shared in (32, 128, 512, 1536, 5000) for burst in (2, 4, 32)),
    *(Workload(burst, num_shared, num_decoding=64) for num_shared in (32, 512) for burst in (4, 32)),
    *(Workload(burst, 4096, max_chunk=512) for burst in (2, 8)),
    Workload(4, 128, num_own=32, num_bursts=100, every_s=0.05, num_outputs=64),
    Workload(4, 1024, num_own=128, num_bursts=100, every_s=0.1, num_outputs=64),
    Workload(8, 0, num_own=512, num_bursts=100, every_s=0.1, num_outputs=64),
]
QUICK = [Workload(4, 512), Workload(2, 32), Workload(2, 0, num_bursts=3, every_s=0.05)]


@attrs.frozen
class Mode:
    name: str
    shares: bool
    step_overhead_tokens: int


MODES = [Mode("off", False, 0), Mode("always", True, 0), Mode("rule", True, STEP_OVERHEAD_TOKENS)]


@attrs.define
class Results:
    """The results of one workload."""

    arrivals: dict[int, float]
    first_tokens: dict[int, float] = attrs.field(factory=dict)
    last_token: float = 0.0
    num_computed: int = 0
    """Prompt tokens."""
    num_tokens: int = 0

    def note(self, done: StepDone, now: float, num_prompt: int) -> None:
        """Record that the pass has ended at `now`."""
        num_tokens = done.num_tokens or [1] * len(done.row_ids)
        for sequence_id, start, end, samples in zip(
            done.row_ids, done.row_starts, done.row_ends, num_tokens, strict=True
        ):
            if sequence_id in self.arrivals:
                self.num_computed += max(0, min(end, num_prompt) - start)
                if samples:
                    self.first_tokens.setdefault(sequence_id, now)
                    self.last_token = now
                    self.num_tokens += 1


def make_jobs(workload: Workload, rng: random.Random) -> deque[tuple[float, Job]]:
    """Return the requests in order of arrival."""
    jobs: deque[tuple[float, Job]] = deque()
    for burst in range(workload.num_bursts):
        shared = rng.choices(range(VOCABULARY), k=workload.num_shared)
        for _ in range(workload.burst):
            token_ids = shared + rng.choices(range(VOCABULARY), k=workload.num_own)
            keys = chain_keys(ROOT, token_ids, BLOCK_SIZE)
            job = Job(len(jobs), token_ids, len(token_ids), keys, workload.num_outputs, ROOT)
            jobs.append((burst * workload.every_s, job))
    return jobs


def make_engine(workload: Workload, mode: Mode) -> SimulatedEngine:
    """Return an engine in which `num_decoding` sequences are already decoding, endlessly."""
    engine = SimulatedEngine(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=256,
            max_num_batched_tokens=NUM_BATCHED_TOKENS,
            max_model_len=NUM_BLOCKS,
            long_prefill_token_threshold=workload.max_chunk,
        ),
        share_pending_prefixes=mode.shares,
        step_overhead_tokens=mode.step_overhead_tokens,
    )
    for index in range(workload.num_decoding):
        engine.submit(Job(1_000_000 + index, [index] * 8, 8, [], NUM_BLOCKS // 2))
    engine.pump()
    while engine.most_running < workload.num_decoding:
        engine.finish_step()
        engine.pump()
    engine.step_times.clear()
    return engine


def serve(engine: SimulatedEngine, workload: Workload, costs: PassCosts) -> Results:
    """Serve the workload, one pass after another."""
    arriving = make_jobs(workload, random.Random(1))
    results = Results({job.id: arrival for arrival, job in arriving})
    num_to_come = len(arriving) * workload.num_outputs
    now = 0.0
    done_at: float | None = None  # end of the current pass
    while results.num_tokens < num_to_come:
        if done_at is None and engine.plans:
            done_at = now + costs.seconds(engine.plans[0])
        if done_at is not None and (not arriving or done_at <= arriving[0][0]):
            now, done_at = done_at, None
            results.note(engine.finish_step(), now, workload.num_shared + workload.num_own)
        else:
            now = max(now, arriving[0][0])
            while arriving and arriving[0][0] <= now:
                engine.submit(arriving.popleft()[1])
        engine.pump()
    return results


def measure(workload: Workload, mode: Mode, costs: PassCosts) -> dict[str, float]:
    with quiet_collector():
        engine = make_engine(workload, mode)
        results = serve(engine, workload, costs)
    waits = sorted(results.first_tokens[i] - arrival for i, arrival in results.arrivals.items())
    return {
        "prompt_tokens": results.num_computed,
        "ttft_ms_p50": round(statistics.median(waits) * 1000, 2),
        "ttft_ms_p99": round(waits[math.ceil(0.99 * len(waits)) - 1] * 1000, 2),
        "last_token_ms": round(results.last_token * 1000, 2),
        "step_us": round(statistics.mean(t.scheduler_ns + t.manager_ns for t in engine.step_times) / 1000, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=10.0, help="virtual time of a pass (default: %(default)s)")
    parser.add_argument("--token-us", type=float, default=20.0, help="virtual time per position (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="smoke test: a few small workloads")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    costs = PassCosts(arguments.step_ms / 1000, arguments.token_us / 1e6)
    rows = [
        {"name": workload.name, **{mode.name: measure(workload, mode, costs) for mode in MODES}}
        for workload in (QUICK if arguments.quick else WORKLOADS)
    ]
    if arguments.json:
        print(json.dumps({"step_ms": arguments.step_ms, "token_us": arguments.token_us, "rows": rows}))
    else:
        print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, with each measure as `off / always / rule`."""
    lines = [
        "| workload | prompt tokens | TTFT p50 ms | TTFT p99 ms | last token ms | us/step |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        measures = [
            " / ".join(f"{row[mode.name][name]:g}" for mode in MODES)
            for name in ("prompt_tokens", "ttft_ms_p50", "ttft_ms_p99", "last_token_ms", "step_us")
        ]
        lines.append(f"| {row['name']} | {' | '.join(measures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
