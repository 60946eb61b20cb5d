"""Engines on two machines, as two network namespaces: under load, with engines killed and the cable unplugged.

    python -m tests.nodes [--minutes 2] [--apart] [--seed N] [--json]

`make test-nodes` runs this; it needs root, `ip` and Ray. The web process, the head of the Ray cluster and one engine
are on the first machine, the other engine on the second, which does not have the checkpoint: it is shipped there
(`--ray-ship-weights`). OpenAI's and Anthropic's clients send requests on the first machine while engines are killed or
paused, keepers are killed, and the cable is unplugged, for a moment or for longer than the host waits for an engine.
With `--apart`, one engine computes prompts and the other continues them, and fetches their blocks over the cable. Every
answer is compared with the undisturbed one, and every record with the answer. The exit code is 1 if anything was lost,
doubled, disputed or wrong, and 2 if this machine cannot run it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs

from tests.chaos.books import check_books
from tests.chaos.chaotic_run import FAKE, MUST_BE_ZERO, tracebacks
from tests.chaos.disturbances import Timeline
from tests.chaos.load import Tally, ask_undisturbed, run_client
from tests.chaos.questions import fixed_questions
from tests.e2e.engine_list import engine_samples, list_engines, wait_all_ready
from tests.e2e.servers import Server, serve_command
from tests.nodes.two_machines import GCS_PORT, Machine, cut, processes_on, two_machines, why_not
from tests.processes import PATIENCE_S, eventually
from tests.tiny import TINY

ENGINE = "quipu.actors.fleet.processes.engine_process"
NUM_CLIENTS = 8
LONG = 60
ALIKE = ("--engines", "ray:2")
APART = ("--engines", "ray:prefill:1,decode:1", "--prefill-local-tokens", "0")
READY_S = 120.0
KINDS = ("engine killed", "engine paused", "keeper killed", "cable cut", "cable cut for long")
SHORT_CUT_S, LONG_CUT_S = (1.0, 6.0), (20.0, 25.0)
"""Shorter and longer than a host waits for an engine that has lost its connection, once that is known."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nodes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="(default: %(default)s)")
    parser.add_argument("--apart", action="store_true", help="prefill on one machine, decode on the other")
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    parser.add_argument("--json", action="store_true", help="print the report alone")
    arguments = parser.parse_args()
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    if (reason := why_not()) is not None:
        print(f"not run: {reason}")
        return 2
    with two_machines() as (one, other), tempfile.TemporaryDirectory(prefix="quipu-nodes-") as folder:
        one.start_ray("--head", "--port", str(GCS_PORT), "--include-dashboard", "false")
        checkpoint = Path(folder, "checkpoint")
        shutil.copytree(TINY, checkpoint)
        other.start_ray("--address", f"{one.address}:{GCS_PORT}", hides=checkpoint)
        engines = APART if arguments.apart else ALIKE
        report = run(one, other, Path(folder), 60 * arguments.minutes, seed, engines, quiet=arguments.json)
    print(json.dumps(report, indent=None if arguments.json else 2))
    return 1 if report["problems"] else 0


def run(
    one: Machine, other: Machine, folder: Path, seconds: float, seed: int, flags: Sequence[str], *, quiet: bool
) -> dict[str, Any]:
    """Serve on both machines with engines as `flags` say, disturb them, and return the report."""
    process, server = start_server(one, folder, flags)
    tally, timeline, stopping, rng = Tally(), Timeline(), threading.Event(), random.Random(seed)
    try:
        wait_all_ready(server, 2, READY_S)
        for machine in (one, other):
            assert len(processes_on(machine, ENGINE)) == 1, "one engine on each machine"
        questions = ask_undisturbed(server, fixed_questions(long=LONG))
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            options = {"long": LONG, "asks_fresh": True}
            tasks = [
                pool.submit(run_client, server, questions, tally, timeline, stopping, tag=f"{seed} {index}", **options)
                for index in range(NUM_CLIENTS)
            ]
            try:
                disturb(server, one, other, timeline, rng, time.monotonic() + seconds, quiet=quiet)
            finally:
                stopping.set()
            for task in tasks:
                task.result()
        wait_all_ready(server, 2, READY_S)
        metrics, by_engine = server.wait_at_rest(), engine_samples(server)
        engines = list_engines(server)
    finally:
        process.send_signal(signal.SIGTERM)
        returncode = process.wait(PATIENCE_S)
    shipped = shipped_files(other)
    problems = [*tally.problems, *(f"in the log: {each[:2000]}" for each in tracebacks(server.log_text))]
    if not shipped or not shipped.items() <= contents(folder / "checkpoint").items() or shipped_files(one):
        problems.append(f"shipped to the second machine: {list(shipped)}, to the first: {list(shipped_files(one))}")
    if returncode:
        problems.append(f"the server ended with {returncode}: {server.log_text[-2000:]}")
    for machine in (one, other):
        with suppress(AssertionError):
            eventually(lambda machine=machine: not processes_on(machine, ENGINE), "the engines end")
        problems += [f"an engine is left on {machine.address}" for _ in processes_on(machine, ENGINE)]
    books = check_books(folder, tally, None, by_engine)
    numbers = {**attrs.asdict(tally), **attrs.asdict(books)}
    report = {name: numbers[name] for name in ("streams_finished", "plain_finished", "left", "refused", "records")}
    report |= {name: numbers[name] for name in MUST_BE_ZERO}
    problems += books.problems + [f"{name} is {numbers[name]}" for name in MUST_BE_ZERO if numbers[name]]
    resumed = sum(value for name, value in metrics.items() if name.startswith("requests_resumed_total"))
    deaths = [its["deaths"] for its in engines]
    stale = metrics.get("stale_frames_total", 0)
    moved = sum(value for name, value in metrics.items() if name.startswith("moved_tokens_total"))
    if flags == APART and not moved:
        problems.append("no blocks were moved")
    return report | {
        "seed": seed,
        "moved_tokens": moved,
        "resumed": resumed,
        "deaths": deaths,
        "stale_frames": stale,
        "shipped_files": len(shipped),
        "disturbances": dict(timeline.counts),
        "problems": problems,
    }


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a folder."""
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def shipped_files(machine: Machine) -> dict[str, str]:
    """Return the digests of the only checkpoint that was shipped to a machine; nothing if there is none."""
    found = [path for path in machine.cache.glob("quipu/checkpoints/*") if path.is_dir()]
    assert len(found) <= 1, found
    return contents(found[0]) if found else {}


def start_server(one: Machine, folder: Path, engines: Sequence[str]) -> tuple[subprocess.Popen[bytes], Server]:
    """Start the server on the first machine; this process goes there, too, so that its clients reach it."""
    join_namespace(one.namespace)
    log_path = folder / "log"
    flags = [str(folder / "checkpoint"), "--served-model-name", "demo", "--ray-ship-weights"]
    flags += [*engines, "--ray-address", f"{one.address}:{GCS_PORT}", "--port", "8000", *FAKE]
    command = [sys.executable, "-c", "import sys; from quipu.web.cli.cli import main; sys.exit(main())"]
    with log_path.open("wb") as log:
        process = subprocess.Popen([*command, *serve_command(*flags)], cwd=folder, stdout=log, stderr=log)
    server = Server(process, log_path, "http://127.0.0.1:8000")
    eventually(lambda: is_listening(server), "the server listens", READY_S)
    return process, server


def is_listening(server: Server) -> bool:
    assert server.process.poll() is None, server.log_text[-2000:]
    return bool(server.events("server.listening"))


def join_namespace(name: str) -> None:
    """Move this process and its later threads to a network namespace."""
    import ctypes

    with Path(f"/run/netns/{name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def disturb(
    server: Server, one: Machine, other: Machine, timeline: Timeline, rng: random.Random, until: float, *, quiet: bool
) -> None:
    """Disturb one thing after the other, all kinds equally often, each time once both engines are ready."""
    order: list[str] = []
    while time.monotonic() < until:
        time.sleep(rng.uniform(1.0, 4.0))
        order = order or rng.sample(KINDS, len(KINDS))
        kind = order.pop()
        if not quiet:
            print(f"{time.strftime('%H:%M:%S')} {kind}", flush=True)
        with timeline.during(server, kind):
            pids = processes_on(rng.choice((one, other)), ENGINE)
            match kind:
                case "engine killed":
                    signal_all(pids, signal.SIGKILL)
                case "engine paused":
                    signal_all(pids, signal.SIGSTOP)
                    time.sleep(rng.uniform(0.2, 3.0))
                    signal_all(pids, signal.SIGCONT)
                case "keeper killed":
                    signal_all([parent_of(pid) for pid in pids], signal.SIGKILL)
                case "cable cut":
                    with cut(other):
                        time.sleep(rng.uniform(*SHORT_CUT_S))
                case _:
                    with cut(other):
                        time.sleep(rng.uniform(*LONG_CUT_S))
        time.sleep(0.5)
        wait_all_ready(server, 2, READY_S)


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    sys.exit(main())
