"""The engines of a server under test: as its admin endpoint lists them, as processes, and in its metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.servers import Server
from tests.processes import PATIENCE_S, eventually

INCARNATION_ARGUMENT = 7
"""Position of the incarnation in the command line of an engine process, which `process_host.py` writes."""
_SAMPLE = re.compile(r"quipu:(\w+)(?:\{(.*)\})? (\S+)")


def list_engines(server: Server) -> list[dict[str, Any]]:
    """Return the engines as /v1/admin/engines lists them."""
    engines: list[dict[str, Any]] = server.get("/v1/admin/engines").json()["engines"]
    return engines


def count_engines(flag: str) -> int:
    """Return how many engines `--engines` starts: `3`, or `prefill:1,decode:2`."""
    return sum(int(part.rpartition(":")[2]) for part in flag.split(","))


def wait_all_ready(server: Server, num_engines: int, within_s: float = PATIENCE_S) -> None:
    """Wait until a server has `num_engines` engines, all of them ready."""

    def are_ready() -> bool:
        try:
            return [its["state"] for its in list_engines(server)] == ["ready"] * num_engines
        except httpx.HTTPError:
            return False  # for example because the server has no descriptors left

    eventually(are_ready, f"{num_engines} engines are ready", within_s)


def engine_pids(server: Server) -> dict[int, int]:
    """Return the pid of each engine by its id, for engines that have not lost their connection since they started."""
    by_incarnation = {}
    for pid in server.engines():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        by_incarnation[int(command[INCARNATION_ARGUMENT])] = pid
    numbers = {its["incarnation"]: its["id"] for its in list_engines(server)}
    return {numbers[number]: pid for number, pid in by_incarnation.items() if number in numbers}


def busy_engine(server: Server) -> int | None:
    """Return the id of an engine that runs a sequence."""
    return next((its["id"] for its in list_engines(server) if its["num_running"]), None)


def engine_samples(server: Server) -> dict[str, dict[str, float]]:
    """Return the samples of /metrics with the label `engine`, by its value, then named as in `Server.metrics`."""
    found: dict[str, dict[str, float]] = {}
    for line in server.get("/metrics").text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is None or 'engine="' not in (match[2] or ""):
            continue
        labels = match[2].split(",")
        (engine,) = (label.partition('"')[2][:-1] for label in labels if label.startswith("engine="))
        rest = ",".join(label for label in labels if not label.startswith(("engine=", "model_name=")))
        found.setdefault(engine, {})[f"{match[1]}{{{rest}}}" if rest else match[1]] = float(match[3])
    return found
