"""Kill servers at random moments, with clients that remember every complete response.

`make kill-ledger` runs `python -m tests.e2e.ledger_kills --kills 200 --executor reference`; `test_ledger_kills.py` does
the same with fewer kills on the fake executor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import httpx

from quipu.actors.ledger.checking import verify
from quipu.actors.ledger.entries import EntryKind
from quipu.actors.ledger.folder import LedgerFolder
from quipu.actors.ledger.reading import entries_after, open_reader
from quipu.actors.ledger.segment_files import BEGINNING
from tests.e2e.prompts import token_prompt
from tests.e2e.servers import Server, eventually, has_ended, serve_command, start_quipu

NUM_CLIENTS = 10
START_S = 100.0
"""More than a start takes on a busy machine."""
MAX_ANSWERS = 15
"""Approximate maximum of responses in one life of a server."""
SMALL_SEGMENT = 256 * 1024
"""So small that many segments are filled and deleted in one run."""


@attrs.define
class Tally:
    """What clients received, over all server lives of one ledger."""

    seen: dict[str, tuple[int, int, int]] = attrs.field(factory=dict)
    """Prompt, cached and completion tokens of every complete response, by the server's request id."""
    num_broken: int = 0
    """Responses cut off by a kill."""
    num_open: int = 0
    """Requests that were admitted and not closed when the server was killed."""
    num_torn: int = 0
    problems: list[str] = attrs.field(factory=list)


def kill_repeatedly(folder: Path, *, num_kills: int, seed: int, flags: list[str]) -> Tally:
    """Kill a server `num_kills` times at random moments, and check the ledger after each kill."""
    rng = random.Random(seed)
    tally = Tally()
    data_dir = folder / "data"
    for life in range(num_kills + 1):
        admitted_before = _admitted(data_dir)
        process, log_path = start_quipu(folder, *serve_command("--port", "0", *flags))
        server = Server(process, log_path)
        is_last = life == num_kills
        try:
            if not is_last and rng.random() < 0.15:  # during start-up, possibly during recovery
                time.sleep(rng.uniform(0.3, 2.5))
            else:
                server.wait_listening(START_S)
                server.wait_ready(START_S)
                _serve_until_killed(server, tally, rng, f"{seed}-{life}", clean_exit=is_last)
        finally:
            engines = server.children()
            process.kill()
            process.wait()
        for pid in engines:
            eventually(lambda pid=pid: has_ended(pid), "the engine ends")
        _check(data_dir, tally, admitted_before, f"life {life}", has_served=bool(server.url))
        if tally.problems:
            break
        if life % 10 == 9:
            print(f"{folder.name}: {life + 1} kills, {len(tally.seen)} responses, no problems", flush=True)
    verdict = verify(data_dir=data_dir)
    if not tally.problems and (verdict.num_open or verdict.torn):
        tally.problems.append(f"after a clean exit {verdict.num_open} are open, torn: {verdict.torn}")
    return tally


def _admitted(data_dir: Path) -> set[str]:
    """Return the ids of all requests in the write-ahead file."""
    entries = entries_after(LedgerFolder(data_dir), BEGINNING)
    return {entry.request_id for entry in entries if entry.kind is EntryKind.ADMITTED}


def _check(data_dir: Path, tally: Tally, admitted_before: set[str], when: str, *, has_served: bool) -> None:
    """Check the ledger while the server is down: no response is missing or duplicated, and the chain is intact."""
    if not LedgerFolder(data_dir).path.is_dir():
        return  # killed before the ledger was created
    verdict = verify(data_dir=data_dir)
    tally.problems += [f"{when}: {bad}" for bad in verdict.bad]
    tally.num_open += verdict.num_open
    tally.num_torn += len(verdict.torn)
    with open_reader(data_dir=data_dir) as reader:
        found = [one.record for one in reader.records()]
    times = Counter(record.request_id for record in found)
    tally.problems += [f"{when}: {one} has {n} records" for one, n in times.items() if n > 1]
    by_id = {record.request_id: record for record in found}
    for request_id, usage in tally.seen.items():
        record = by_id.get(request_id)
        if record is None:
            tally.problems.append(f"{when}: {request_id} was answered but has no record")
        elif (record.prompt_tokens, record.cached_tokens, record.completion_tokens) != usage:
            tally.problems.append(f"{when}: {request_id} was answered with {usage}, the ledger has {record}")
    if has_served:
        lost = admitted_before - by_id.keys()
        tally.problems += [f"{when}: {one} was admitted before an earlier kill and never closed" for one in lost]


def _serve_until_killed(server: Server, tally: Tally, rng: random.Random, tag: str, *, clean_exit: bool) -> None:
    stopping = threading.Event()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(_ask, server.url, tally, f"{tag}-{i}", stopping) for i in range(NUM_CLIENTS)]
        # a count, because on a busy machine little is done in a given time
        wanted = len(tally.seen) + rng.randrange(MAX_ANSWERS)
        eventually(lambda: len(tally.seen) >= wanted, "responses arrive")
        time.sleep(rng.uniform(0.0, 0.1))
        if clean_exit:
            stopping.set()
            for client in clients:
                client.result()
            assert server.stop() == 0, server.log_text
        else:
            server.process.kill()
            stopping.set()
        for client in clients:
            client.result()


def _ask(url: str, tally: Tally, tag: str, stopping: threading.Event) -> None:
    """Act as one client: sequential requests, streamed and not, short and long, some of them abandoned midway."""
    rng = random.Random(tag)
    with httpx.Client(base_url=url, timeout=20.0) as client:
        while not stopping.is_set():
            streams = rng.random() < 0.6
            body = {
                "model": "demo",
                "prompt": token_prompt(f"shared {rng.randrange(4)}", rng.randrange(5, 120)),
                "max_tokens": rng.choice([1, 2, 4, 30]),
                "temperature": 0,
                "ignore_eos": True,
                "stream": streams,
            }
            if streams:
                body["stream_options"] = {"include_usage": True}
            try:
                _ask_once(client, body, tally, leaves=rng.random() < 0.1)
            except httpx.HTTPError:
                tally.num_broken += 1
                if stopping.wait(0.01):
                    return


def _ask_once(client: httpx.Client, body: dict[str, Any], tally: Tally, *, leaves: bool) -> None:
    with client.stream("POST", "/v1/completions", json=body) as response:
        request_id = response.headers["X-Quipu-Request-Id"]
        if not body["stream"]:
            response.read()
            usage = response.json().get("usage")
        else:
            usage, is_whole = None, False
            for line in response.iter_lines():
                if leaves:
                    return
                is_whole = is_whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
            if not is_whole:
                return
    if response.status_code == 200 and usage is not None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tally.seen[request_id] = (usage["prompt_tokens"], cached, usage["completion_tokens"])


def kill_concurrently(folder: Path, *, num_kills: int, num_lanes: int, seed: int, flags: list[str]) -> list[Tally]:
    """Run several ledgers concurrently, each with its share of the kills."""
    with ThreadPoolExecutor(num_lanes) as pool:
        lanes = []
        for lane in range(num_lanes):
            share = num_kills // num_lanes + (lane < num_kills % num_lanes)
            (folder / f"lane-{lane}").mkdir()
            lanes.append(
                pool.submit(kill_repeatedly, folder / f"lane-{lane}", num_kills=share, seed=seed + lane, flags=flags)
            )
        return [lane.result() for lane in lanes]


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill servers, and check that no record is lost or duplicated.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    parser.add_argument("--executor", choices=["reference", "fake"], default="reference")
    arguments = parser.parse_args()
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    flags = ["--executor", arguments.executor, "--ledger-segment-bytes", str(SMALL_SEGMENT)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tallies = kill_concurrently(
            Path(folder), num_kills=arguments.kills, num_lanes=arguments.lanes, seed=seed, flags=flags
        )
    problems = [problem for tally in tallies for problem in tally.problems]
    print(
        f"{arguments.kills} kills in {time.monotonic() - started:.0f} s (seed {seed}): "
        f"{sum(len(tally.seen) for tally in tallies)} complete responses, "
        f"{sum(tally.num_broken for tally in tallies)} cut off, "
        f"{sum(tally.num_open for tally in tallies)} open requests closed by recovery, "
        f"{sum(tally.num_torn for tally in tallies)} torn writes, {len(problems)} problems"
    )
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
