"""Compare a decode step that shares the processor with other work to the same step alone.

    python -m bench.beside [--json] [--quick] [--layers 28] [--rounds 5] [--num-seqs 1]

- planning: another thread of the process plans 256 sequences while the step runs, as the engine's own loop does. A step
  is one call that releases the GIL, so planning should cost nothing if a core is free; if the step uses every core,
  planning takes its share of one. Both are measured: with one thread fewer than there are cores, and with all.
- neighbour: another process keeps one core busy while the step uses all threads.

Steps with and without the other work alternate, and a ratio is of medians, so that other load on the machine affects
both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

# the same setting as in the server's engine process; torch reads it once, when it loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

from bench.engine_jobs import decoding_engine, quiet_collector
from bench.execution import make_backend
from bench.shapes import QWEN3_06B as SHAPE
from bench.shapes import TINY
from bench.step_works import BLOCK_SIZE, CONTEXT, Setting, Work, make_batch
from quipu.kernels.cpu.cpu_backend import CpuBackend

PLANNED = 256
QUICK_PLANNED = 8
NUM_BLOCKS = 1 << 16
STEPS_A_TURN = 6


class Planner:
    """A thread that plans one step of many sequences at each `begin`."""

    def __init__(self, num_seqs: int) -> None:
        self._engine = decoding_engine(num_seqs=num_seqs, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self._begin, self._done = threading.Event(), threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def begin(self) -> None:
        self._done.clear()
        self._begin.set()

    def wait_done(self) -> None:
        self._done.wait()

    def close(self) -> None:
        self._closing = True
        self._begin.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._begin.wait()
            self._begin.clear()
            if self._closing:
                return
            self._engine.finish_step()
            self._engine.pump()
            self._done.set()


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Keep one core busy with another process while the block runs."""
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def beside_planning(step: Callable[[], object], rounds: int, planned: int) -> dict[str, float]:
    """Return medians in milliseconds."""
    planner = Planner(planned)
    alone, beside = [], []

    def with_plan() -> None:
        planner.begin()
        step()

    with quiet_collector():
        for _ in range(rounds * STEPS_A_TURN):
            alone.append(timed(step))
            beside.append(timed(with_plan))
            planner.wait_done()
    planner.close()
    return medians(alone, beside)


def beside_neighbour(step: Callable[[], object], rounds: int) -> dict[str, float]:
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        for times, context in ((alone, nullcontext()), (beside, busy_neighbour())):
            with context:
                step()
                times.extend(timed(step) for _ in range(STEPS_A_TURN))
    return medians(alone, beside)


def medians(alone: list[float], beside: list[float]) -> dict[str, float]:
    first, second = statistics.median(alone), statistics.median(beside)
    return {"alone_ms": first * 1000, "beside_ms": second * 1000, "ratio": second / first}


def measure(num_seqs: int, rounds: int, planned: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    work = Work("decode", num_seqs, 1, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        backend = make_backend(Setting("cpu"), Path(folder))
        assert isinstance(backend, CpuBackend)
        batch = make_batch(work)
        backend.step(batch)
        most = backend.num_threads
        for num_threads in sorted({max(1, most - 1), most}):
            backend.num_threads = num_threads
            rows[f"planning {planned}, {num_threads} of {most} threads"] = beside_planning(
                lambda: backend.step(batch), rounds, planned
            )
        rows[f"busy neighbour, {most} of {most} threads"] = beside_neighbour(lambda: backend.step(batch), rounds)
        backend.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, one round")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-seqs", type=int, default=1, help="decoding sequences")
    arguments = parser.parse_args()
    SHAPE["num_hidden_layers"] = arguments.layers
    if arguments.quick:
        SHAPE.update(TINY)
    rounds, planned = (1, QUICK_PLANNED) if arguments.quick else (arguments.rounds, PLANNED)
    rows = measure(arguments.num_seqs, rounds, planned)
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'':34} {'alone':>9} {'beside':>9} {'ratio':>7}")
    for name, row in rows.items():
        print(f"{name:34} {row['alone_ms']:6.1f} ms {row['beside_ms']:6.1f} ms {row['ratio']:6.2f}x")


if __name__ == "__main__":
    main()
