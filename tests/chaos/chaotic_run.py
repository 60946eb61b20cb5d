"""The part `load` of a chaotic run: starts the servers, their clients and what disturbs them, and makes the report."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

from tests.chaos.books import Books, check_books
from tests.chaos.disturbances import (
    READY_S,
    Around,
    Engines,
    Pace,
    Timeline,
    disturb_engines,
    disturb_surroundings,
    ready,
    small_disk,
)
from tests.chaos.load import Tally, ask_undisturbed, run_client
from tests.chaos.questions import fixed_questions
from tests.chaos.tier_faults import Tiers
from tests.e2e.engine_list import count_engines, engine_samples, list_engines, wait_all_ready
from tests.e2e.servers import Server, serve_command, start_quipu
from tests.postgres import CannotRun, Postgres, running_cluster
from tests.processes import eventually, free_ports, has_ended
from tests.tiny import EXECUTOR

FAKE = [
    *("--executor", "fake", "--fake-step-seconds", "0.005", "--max-num-seqs", "24", "--max-num-batched-tokens", "512"),
    *("--num-blocks", "250", "--max-model-len", "2048", "--ledger-segment-bytes", str(256 * 1024)),
    *(
        "--kv-load",
        "always",
        "--kv-host-memory",
        "128KiB",
    ),  # 1,024 blocks: the device has a quarter of them, so that many come from there
    *("--fake-most-tokens", "4"),  # a sequence yields one to four tokens in a step
]
TINY_MODEL = [
    *("--num-blocks", "120", "--max-num-seqs", "8", "--ledger-segment-bytes", str(256 * 1024)),
    *("--kv-load", "always", "--kv-host-memory", "64MiB"),
]
ON_VLLM = [*TINY_MODEL, "--num-blocks", "20"]  # of 32 tokens: more would hold all that is ever asked
NUM_CLIENTS, NUM_TINY_CLIENTS, NUM_QUICK = 16, 4, 3
LONG, LONG_QUICK = 90, 12
"""Approximate maximum of tokens in an answer."""
NUM_REPLACED = 4
"""Weight of replaced engines, where there are several, beside `Pace.kinds`."""
DISK_MIB = 64
START_S = 120.0


@attrs.define
class Scene:
    """One server of the run, with its clients and its books."""

    name: str
    folder: Path
    flags: list[str]
    engines: str
    num_clients: int
    asks_fresh: bool
    database: Postgres | None = None
    disk: Path | None = None
    url: str | None = None
    tally: Tally = attrs.field(factory=Tally)


def run_load(
    folder: Path,
    seconds: float,
    seed: int,
    left_out: list[str],
    engines: str,
    *,
    quick: bool,
    has_tiers: bool = False,
) -> dict[str, Any]:
    """Run the load for `seconds`, on servers with these `--engines` each. Adds to `left_out` what cannot be done here.

    Returns the report.
    """
    timeline, stopping = Timeline(), threading.Event()
    pace = Pace(0.5, 1.0, 0.2, ("killed", "paused")) if quick else Pace()
    num_engines = count_engines(engines)
    if num_engines > 1:
        pace = attrs.evolve(pace, kinds=(*pace.kinds, *("replaced",) * NUM_REPLACED))
    with ExitStack() as stack:
        name, flags = ("tiny model on vLLM", ON_VLLM) if EXECUTOR == "vllm" else ("fake executor", FAKE)
        scenes = [_stored_scene(name, flags, folder, left_out, stack, engines, quick=quick)]
        if quick:
            left_out.append("the tiny model and PostgreSQL: --quick")
        elif EXECUTOR != "vllm":
            tiny = Scene("tiny model", folder / "tiny", TINY_MODEL, engines, NUM_TINY_CLIENTS, asks_fresh=False)
            scenes.append(tiny)
        tiers: dict[str, Tiers] = {}
        if has_tiers:
            for scene in scenes:
                (below := folder / f"tiers of {scene.name}").mkdir()
                tiers[scene.name] = Tiers(below)
                scene.flags = [*scene.flags, *tiers[scene.name].flags("8MiB" if scene.flags is FAKE else "32MiB")]
        servers = [stack.enter_context(_serving(scene)) for scene in scenes]
        pool = stack.enter_context(ThreadPoolExecutor(64))
        tasks: list[Future[None]] = []
        stack.callback(stopping.set)
        for scene, server in zip(scenes, servers, strict=True):
            long = LONG_QUICK if quick else LONG
            questions = ask_undisturbed(server, fixed_questions(long=long))
            options = {"long": long, "asks_fresh": scene.asks_fresh}
            for index in range(scene.num_clients):
                tag = f"{seed} {scene.name} {index}"
                tasks.append(
                    pool.submit(run_client, server, questions, scene.tally, timeline, stopping, tag=tag, **options)
                )
            starting = threading.Lock()
            several = Engines(server, num_engines, starting)
            around = Around(server, starting, scene.database, scene.disk)
            if scene.name in tiers:
                rng = random.Random(f"{seed} {scene.name} tiers")
                tasks.append(pool.submit(tiers[scene.name].disturb, rng, stopping))
            for disturb, what in ((disturb_engines, several), (disturb_surroundings, around)):
                rng = random.Random(f"{seed} {scene.name} {disturb.__name__}")
                tasks.append(pool.submit(disturb, what, timeline, pace, rng, stopping))
        _wait(tasks, seconds)
        eventually(lambda: timeline.counts, "something has been disturbed")
        stopping.set()
        for task in tasks:
            task.result()
        reports = []
        for scene, server in zip(scenes, servers, strict=True):
            try:
                wait_all_ready(server, num_engines, READY_S)
            except AssertionError:
                scene.tally.problems.append(f"not {num_engines} ready engines at the end: {list_engines(server)}")
            metrics, by_engine = server.wait_at_rest(), engine_samples(server)
            scene.tally.problems += _faults_of(server, metrics)
            assert server.stop() == 0, server.log_text[-2000:]
            reports.append(_report(scene, check_books(scene.folder, scene.tally, scene.url, by_engine), metrics))
    whole = {name: sum(report[name] for report in reports) for name in TOTALS}
    problems = [f"{scene.name}: {problem}" for scene in scenes for problem in scene.tally.problems]
    problems += [f"{name} is {whole[name]}" for name in MUST_BE_ZERO if whole[name]]
    for name, its_tiers in tiers.items():
        timeline.counts.update({f"{name}: {what}": num for what, num in its_tiers.counts.items()})
    servers_report = {scene.name: report for scene, report in zip(scenes, reports, strict=True)}
    return {**whole, "disturbances": dict(timeline.counts), "servers": servers_report, "problems": problems}


MUST_BE_ZERO = (
    *("tokens_lost", "tokens_doubled", "answers_wrong", "accounts_disputed", "records_lost", "records_doubled"),
    *("records_wrong", "failed_for_others"),
)
TOTALS = (
    "blocks_loaded",
    *("streams_finished", "plain_finished", "left", "refused", "failed_of_shortage", "records", "resumed"),
    *MUST_BE_ZERO,
)


def _stored_scene(
    name: str,
    flags: list[str],
    folder: Path,
    left_out: list[str],
    stack: ExitStack,
    engines: str,
    *,
    quick: bool,
) -> Scene:
    """Make the scene with the most clients: its files are on a small disk, its ledger in PostgreSQL."""
    disk = folder / "disk"
    disk.mkdir()
    why = stack.enter_context(small_disk(disk, DISK_MIB))
    if why is not None:
        left_out.append(f"disk full: {why}")
    is_fake = flags is FAKE
    num_clients = NUM_QUICK if quick else NUM_CLIENTS if is_fake else NUM_TINY_CLIENTS
    scene = Scene(name, disk / "server", flags, engines, num_clients, asks_fresh=is_fake)
    scene.disk = disk if why is None else None
    if not quick:
        try:
            scene.database = stack.enter_context(running_cluster())
            scene.url = scene.database.new_database()
        except CannotRun as error:
            left_out.append(f"database away: {error}")
    return scene


@contextmanager
def _serving(scene: Scene) -> Iterator[Server]:
    """Run a server until the block is left; what it logs may be lost when its disk is full."""
    (port,) = free_ports(1)
    flags = ["--engines", scene.engines, "--port", str(port)]
    if ":" in scene.engines:
        flags += ["--prefill-local-tokens", "0"]  # prompts are short
    if scene.url is not None:
        os.environ["QUIPU_LEDGER_URL"] = scene.url
    try:
        process, log_path = start_quipu(scene.folder, *serve_command(*scene.flags, *flags))
    finally:
        os.environ.pop("QUIPU_LEDGER_URL", None)
    server = Server(process, log_path, f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: ready(server), "the server is ready", START_S)
        yield server
    finally:
        engines = server.children()
        process.kill()
        process.wait()
        for pid in engines:
            eventually(lambda pid=pid: has_ended(pid), "the engine ends")


def _wait(tasks: list[Future[None]], seconds: float) -> None:
    """Wait for `seconds`, or until a task raises."""
    from concurrent.futures import FIRST_EXCEPTION, wait

    done, _ = wait(tasks, seconds, FIRST_EXCEPTION)
    for task in done:
        task.result()


SHORTAGES = ("MemoryError", "can't start new thread", "failed to map segment", "Cannot allocate memory")


def tracebacks(log: str) -> list[str]:
    """Return the tracebacks in a log, except those about a lack of memory, which is a disturbance."""
    entries: list[str] = []
    for line in log.splitlines():
        if line.startswith("{") or not entries or entries[-1].startswith("{"):
            entries.append(line)
        else:
            entries[-1] += "\n" + line
    return [each for each in entries if "Traceback" in each and not any(word in each for word in SHORTAGES)]


def _faults_of(server: Server, metrics: dict[str, float]) -> list[str]:
    faults = [f"in the log: {each[:3000]}" for each in tracebacks(server.log_text)]
    if metrics["usage_disputed_total"]:
        faults.append(f"{metrics['usage_disputed_total']:g} accounts are disputed")
    if corrupt := metrics['kv_tier_failed_load_blocks_total{reason="corrupt",tier="host"}']:
        faults.append(f"{corrupt:g} blocks on the host were corrupt")
    return faults


def _report(scene: Scene, books: Books, metrics: dict[str, float]) -> dict[str, Any]:
    tally = scene.tally
    tally.problems += books.problems
    counted = {
        field.name: getattr(tally, field.name)
        for field in attrs.fields(Tally)
        if field.name in TOTALS or field.name in MUST_BE_ZERO
    }
    resumed = sum(value for name, value in metrics.items() if name.startswith("requests_resumed_total"))
    about_books = {name: value for name, value in attrs.asdict(books).items() if name != "problems"}
    by_tier = {
        tier: metrics.get(f'kv_tier_loaded_blocks_total{{tier="{tier}"}}', 0.0) for tier in ("host", "disk", "remote")
    }
    return {
        **counted,
        **about_books,
        "resumed": resumed,
        "blocks_loaded": sum(by_tier.values()),
        "blocks_loaded_by_tier": by_tier,
        "blocks_corrupt_on_disk": metrics.get('kv_tier_corrupt_total{tier="disk"}', 0.0),
        "by_question": dict(tally.by_question),
    }
