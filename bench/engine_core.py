"""Measure scheduler and block manager in microseconds, and vLLM's scheduler and KV-cache manager in the same run.

    python -m bench.engine_core [--json] [--quick] [--trace TRACE]

Nothing is computed: results of steps are made up outside the timers. Quipu's jobs run in this process
(`engine_jobs.py`, `engine_link.py`), the peer's in a separate process with the environment that `make peers` builds
(`peers/vllm_engine.py`). The two alternate, and a row has the median of each side's rounds. Without that environment
the peer's numbers are null.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from bench import engine_jobs, engine_link
from bench.engine_jobs import Numbers

REPOSITORY = Path(__file__).resolve().parent.parent
PEER = REPOSITORY / ".peers" / "vllm" / "bin" / "python"
PEER_SCRIPT = Path(__file__).resolve().parent / "peers" / "vllm_engine.py"
NO_PEER = "vLLM is not measured: `make peers` builds its environment (about 3 GB)"
OURS: dict[str, Callable[..., Numbers]] = {
    "step": engine_jobs.step,
    "prompt": engine_jobs.prompt,
    "trace": engine_jobs.trace,
    "actors": engine_jobs.actors,
    "link": engine_link.link,
}
OURS_ALONE = ("actors", "link")
"""Jobs that the peer has nothing like."""
BLOCK = 16
ROW_STEPS = 20_000
"""Minimum of steps times sequences in a round: a few milliseconds would only measure how fast a processor wakes up."""
TRACE_BLOCKS, TRACE_BLOCK = 50_000, 512
PROMPT_ROWS = {
    "hash_us": "hash a prompt",
    "cold_us": "take, publish and release a prompt of which nothing is cached",
    "idle_us": "find and take a cached prompt",
    "held_us": "find and take a cached prompt that another holds",
    "release_us": "release a cached prompt",
}


@attrs.frozen
class Task:
    """One job for both sides, and the names of its rows."""

    job: str
    arguments: dict[str, Any]
    rows: dict[str, str]
    """Row name by the name of the number."""


@attrs.frozen
class Row:
    name: str
    quipu_us: float
    vllm_us: float | None
    ratio: float | None
    """vLLM's time divided by quipu's."""


class Peer:
    """The peer's process, which does one job at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, job: str, arguments: dict[str, Any]) -> Numbers:
        """Run a job and return its numbers. Raises ConnectionError if the process has died."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise ValueError("the peer has no pipes")
        process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise ConnectionError(f"the peer died running {job} {arguments}")
        numbers: Numbers = json.loads(line)
        return numbers


@contextmanager
def open_peer() -> Iterator[Peer]:
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [PEER, PEER_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield Peer(process)
        except (ConnectionError, BrokenPipeError) as error:
            errors.seek(0)
            raise ConnectionError(f"{error}; its last output:\n{errors.read()[-2000:]}") from error
        finally:
            process.kill()
            process.communicate()


def step_task(job: str, num_seqs: int, num_blocks: int, num_steps: int, name: str) -> Task:
    # a sequence starts with at most two blocks; none may have to be preempted while it is timed
    room = (num_blocks // num_seqs - 2) * BLOCK - engine_jobs.NUM_STEPS_TO_SETTLE - 2
    arguments = {"num_seqs": num_seqs, "num_blocks": num_blocks, "block_size": BLOCK, "num_steps": min(num_steps, room)}
    return Task(job, arguments, {"step_us": name})


def make_tasks(*, quick: bool, num_steps: int, trace: Path | None) -> list[Task]:
    counts, pools = ([1, 32], [10_000]) if quick else ([1, 32, 256, 1024], [10_000, 100_000, 1_000_000])
    steps = {n: num_steps if quick else max(num_steps, ROW_STEPS // n) for n in counts}
    tasks = [
        step_task("step", num_seqs, num_blocks, steps[num_seqs], f"step, {num_seqs} decoding, {num_blocks} blocks")
        for num_blocks in pools
        for num_seqs in counts
    ]
    num_tokens, repeats = (2048, 3) if quick else (32_768, 20)
    arguments = {"num_tokens": num_tokens, "num_blocks": 10_000, "block_size": BLOCK, "repeats": repeats}
    rows = {key: f"{what}, {num_tokens} tokens, per block" for key, what in PROMPT_ROWS.items()}
    tasks.append(Task("prompt", arguments, rows))
    tasks += [
        step_task("actors", num_seqs, 10_000, num_steps, f"step of the actors over channels, {num_seqs} decoding")
        for num_seqs in counts
    ]
    tasks += [
        Task(
            "link",
            {"num_seqs": num_seqs, "num_steps": 10 * num_steps},
            {kind: f"report and answer over {what}, {num_seqs} decoding" for kind, what in engine_link.KINDS.items()},
        )
        for num_seqs in counts
    ]
    if trace is not None:
        whole = {"path": str(trace.resolve()), "num_blocks": TRACE_BLOCKS, "block_size": TRACE_BLOCK}
        row = f"trace in the manager, {TRACE_BLOCKS} blocks, per request"
        tasks.append(Task("trace", whole, {"request_us": row}))
    return tasks


def measure(task: Task, peer: Peer | None, rounds: int) -> tuple[Numbers, Numbers | None]:
    """Return the medians of both sides, which alternate so that other load on the machine affects both."""
    with_peer = peer is not None and task.job not in OURS_ALONE
    ours: list[Numbers] = []
    theirs: list[Numbers] = []
    for _ in range(rounds):
        ours.append(OURS[task.job](**task.arguments))
        if peer is not None and with_peer:
            theirs.append(peer.run(task.job, task.arguments))
    return medians(ours), medians(theirs) if theirs else None


def medians(rounds: list[Numbers]) -> Numbers:
    return {name: statistics.median(numbers[name] for numbers in rounds) for name in rounds[0]}


def make_rows(task: Task, ours: Numbers, theirs: Numbers | None) -> list[Row]:
    rows = []
    for key, name in task.rows.items():
        quipu_us = round(ours[key], 3)
        vllm_us = None if theirs is None else round(theirs[key], 3)
        rows.append(Row(name, quipu_us, vllm_us, None if vllm_us is None else round(vllm_us / quipu_us, 2)))
    return rows


def print_row(row: Row) -> None:
    vllm_us, ratio = ("-" if value is None else value for value in (row.vllm_us, row.ratio))
    print(f"{row.name:<82} {row.quipu_us:>10} {vllm_us:>10} {ratio:>6}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_core", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: a few small rows, quipu alone")
    parser.add_argument(
        "--trace", type=Path, help=f"also replay this trace with {TRACE_BLOCKS} blocks of {TRACE_BLOCK}"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="timed per round, more if there are few sequences (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    arguments = parser.parse_args()
    num_steps, rounds = (20, 1) if arguments.quick else (arguments.steps, arguments.rounds)
    with_peer = PEER.exists() and not arguments.quick
    if not PEER.exists():
        print(NO_PEER, file=sys.stderr)
    tasks = make_tasks(quick=arguments.quick, num_steps=num_steps, trace=arguments.trace)
    load_before = os.getloadavg()[0]
    rows: list[Row] = []
    traced: dict[str, Numbers | None] = {}
    if not arguments.json:
        print(f"{'us':<82} {'quipu':>10} {'vllm':>10} {'ratio':>6}")
    with open_peer() if with_peer else no_peer() as peer:
        for task in tasks:
            ours, theirs = measure(task, peer, rounds)
            if task.job == "trace":
                traced = {"quipu": ours, "vllm": theirs}
            for row in make_rows(task, ours, theirs):
                rows.append(row)
                if not arguments.json:
                    print_row(row)
    if arguments.json:
        report = {"rows": [attrs.asdict(row) for row in rows], "load_before": load_before}
        print(json.dumps({**report, "trace": traced} if traced else report))
        return
    for side, numbers in traced.items():
        if numbers is not None:
            print(f"trace: {side} found {numbers['hit_blocks']:.0f} blocks in {numbers['manager_seconds']:.3f} s")
    for num_seqs in (256, 1024):
        num_bytes = engine_link.report_bytes(num_seqs)
        print(f"bytes of a report over the link, {num_seqs} decoding: {num_bytes}")
    print(f"load of the machine at the start: {load_before:.2f}")


@contextmanager
def no_peer() -> Iterator[None]:
    yield None


if __name__ == "__main__":
    main()
