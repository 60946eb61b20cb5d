"""Thousands of clients that connect, ask and vanish at random moments: afterwards a server holds what it held before.

They come in rounds, on a server whose web process counts what it holds (`counted_server.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from tests.chaos.counted_server import FILE
from tests.e2e.engine_list import count_engines, wait_all_ready
from tests.e2e.prompts import expected_text, token_prompt
from tests.e2e.servers import Server, eventually, num_files, serve_command, settled_num_files
from tests.e2e.vanishing import EventClock, draw_behaviours, read_steadily, vanish

ROOT = Path(__file__).resolve().parents[2]
NUM_PER_ROUND = 500
EVENTS_PER_CLIENT = 2
ROUND_S = 120.0
FLAGS = ["--executor", "fake", "--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--num-blocks", "400"]
FLAGS += ["--max-model-len", "6000", "--fake-most-tokens", "4"]
MAY_BE_FEWER = ("tasks", "files", "engine_files", "threads", "processes")
"""More of these than before is a leak; fewer is not."""


@contextmanager
def counted(folder: Path, engines: str) -> Iterator[Server]:
    """Run a server whose web process counts what it holds."""
    log_path, counts = folder / "server.log", folder / "counts.json"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, FILE: str(counts), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.chaos.counted_server", *serve_command(*FLAGS)]
    command += ["--engines", engines]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", "0"], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=log
        )
    server = Server(process, log_path)
    try:
        server.wait_listening()
        wait_all_ready(server, count_engines(engines))
        yield server
        assert server.stop() == 0, server.log_text[-2000:]
    finally:
        process.kill()
        process.wait()


def held(server: Server, folder: Path) -> dict[str, Any]:
    """Return what a server at rest holds."""
    path = folder / "counts.json"
    path.unlink(missing_ok=True)
    os.kill(server.pid, signal.SIGUSR2)
    eventually(path.exists, "the counts are written")
    metrics = server.metrics()
    free = metrics['kv_blocks{state="free"}'] + metrics['kv_blocks{state="cached"}']
    counts: dict[str, Any] = json.loads(path.read_text())
    return counts | {
        "free_blocks": free,
        "files": num_files(server.pid),
        "engine_files": sum(map(num_files, server.engines())),
        "threads": len(list(Path(f"/proc/{server.pid}/task").iterdir())),
        "processes": len(server.children()),
    }


def run_vanishing_clients(folder: Path, num_clients: int, seed: int, engines: str) -> dict[str, Any]:
    """Run clients in rounds. Returns a report."""
    problems: list[str] = []
    with counted(folder, engines) as server:
        assert server.complete(token_prompt("before", 57), max_tokens=12).status_code == 200
        trio.run(_one_round, server, seed - 1, min(num_clients, 20))  # starts everything that is started only once
        before = _at_rest(server, folder)
        first = server.metrics()
        for start in range(0, num_clients, NUM_PER_ROUND):
            trio.run(_one_round, server, seed + start, min(NUM_PER_ROUND, num_clients - start))
            server.wait_at_rest()
        after: dict[str, Any] = {}

        def is_as_before() -> bool:
            after.update(held(server, folder))
            # threads and processes that have had no work for a while end, with their tasks and sockets
            fewer = {name: min(after[name], before[name]) for name in MAY_BE_FEWER}
            return after == before | fewer

        try:
            eventually(is_as_before, "it holds what it held before")
        except AssertionError:
            problems.append(f"not at the baseline: {after} instead of {before}")
        last = server.metrics()
        outcomes = {name: last[name] - first[name] for name in last if name.startswith("requests_total")}
        if last["usage_disputed_total"] or last['requests_total{outcome="failed"}']:
            problems.append("accounts disputed, or requests failed")
        prompt = token_prompt("vanishing 0", 57)  # cached by those that vanished
        text = server.complete(prompt, max_tokens=12).json()["choices"][0]["text"]
        if text != expected_text(prompt, 12):
            problems.append("a wrong answer afterwards")
        if "Traceback" in server.log_text or "crashed" in server.log_text:
            problems.append("a traceback in the log")
    return {"clients": num_clients, "before": before, "after": after, "outcomes": outcomes, "problems": problems}


def _at_rest(server: Server, folder: Path) -> dict[str, Any]:
    server.wait_at_rest()
    settled_num_files(server.pid)
    seen: list[dict[str, Any]] = []

    def is_settled() -> bool:
        seen.append(held(server, folder))
        return len(seen) > 5 and all(each == seen[-1] for each in seen[-5:])

    eventually(is_settled, "the counts settle")
    return seen[-1]


async def _one_round(server: Server, seed: int, num_clients: int) -> None:
    clock = EventClock()
    with trio.fail_after(ROUND_S):
        async with trio.open_nursery() as steady:
            steady.start_soon(read_steadily, server, clock)
            async with trio.open_nursery() as clients:
                behaviours = draw_behaviours(seed, num_clients, EVENTS_PER_CLIENT * num_clients)
                for index, behaviour in enumerate(behaviours):
                    clients.start_soon(vanish, server, clock, index, behaviour)
            steady.cancel_scope.cancel()
