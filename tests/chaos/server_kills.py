"""Kill whole servers that keep KV on a disk, start them again on the same disk, and check every answer.

    python -m tests.chaos.server_kills [--kills 100] [--seed 0]

A server of the tiny model has room for a few prompts on the device, and for less than half of them on its disk. Clients
keep asking for prompts of a pool, so that blocks are being stored and loaded all the time; at a drawn moment, now and
then already while it starts, all processes of the server are killed with SIGKILL. After the last kill a server answers
every prompt and ends as it should.

What must hold: every answer has the bits that a server without tiers computes (text and log probabilities), no record
is disputed, and prompts are found on the disk after a kill. The report is JSON; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import httpx

from quipu.actors.ledger.reading import open_reader
from quipu.actors.messages.tiers import Tier
from tests.e2e.servers import BLOCK, Server, eventually, has_ended, serve_command, serving, start_quipu

NUM_PROMPTS, NUM_BLOCKS = 40, 20
"""The pool, and the blocks of each prompt."""
NUM_CLIENTS = 4
SMALL = ("--num-blocks", "128", "--kv-load", "always", "--max-model-len", str((NUM_BLOCKS + 2) * BLOCK))
"""Room for six prompts on the device."""
DISK_BYTES_EACH = 300 << 10
"""Of the disk, for each prompt: less than half of what its blocks take, so that segments are emptied all the time."""
MOST_ANSWERS = 100
"""In one life of a server, about."""
KILLED_AT_START = 0.1
"""The share of lives that end while the server starts."""
START_S = 100.0
"""More than a start takes on a busy machine."""
RECENT_S = 0.02

Bits = tuple[str, tuple[float, ...]]
"""The text of an answer, and the log probabilities of its tokens."""


@attrs.define
class Tally:
    """What was seen over all lives of the servers."""

    num_kills: int = 0
    num_kills_at_start: int = 0
    num_kills_at_store: int = 0
    """Kills no later than `RECENT_S` after a write to the disk."""
    num_unanswered: int = 0
    """Requests that were open when their server was killed."""
    num_answers: int = 0
    num_wrong: int = 0
    num_disputed: int = 0
    num_lives_with_hits: int = 0
    """Lives in which a prompt was found on the disk."""
    num_records: int = 0
    num_found: int = 0
    """Blocks that were found on the disk when servers started."""
    num_corrupt: int = 0
    """Blocks that were found to be damaged when they were loaded."""
    cached: Counter[str] = attrs.field(factory=Counter)
    """Tokens by the tier that they came from."""

    @property
    def is_right(self) -> bool:
        return not self.num_wrong and not self.num_disputed and self.cached[Tier.DISK] > 0


def prompt(number: int) -> list[int]:
    return [*random.Random(number).choices(range(300, 2000), k=NUM_BLOCKS * BLOCK), 7]


def ask(url: str, number: int) -> tuple[Bits, dict[str, int]]:
    """Return the answer for a prompt of the pool, and its cached tokens by tier."""
    body = {
        "model": "demo", "prompt": prompt(number), "max_tokens": 6, "temperature": 0, "ignore_eos": True,
        "logprobs": 1, "return_cached_tokens_details": True,
    }  # fmt: skip
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=START_S)
    answer: Any = response.raise_for_status().json()
    choice = answer["choices"][0]
    by_tier: dict[str, int] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return (choice["text"], tuple(choice["logprobs"]["token_logprobs"])), by_tier


def cold_answers(folder: Path, num_prompts: int) -> list[Bits]:
    """Return what a server that finds nothing answers to each prompt."""
    with serving(folder, "--no-enable-prefix-caching", *SMALL[:2]) as server:
        return [ask(server.url, number)[0] for number in range(num_prompts)]


def kill_repeatedly(
    folder: Path,
    *,
    num_kills: int,
    seed: int,
    num_prompts: int = NUM_PROMPTS,
    most_answers: int = MOST_ANSWERS,
) -> Tally:
    draw, tally = random.Random(seed), Tally()
    cold = cold_answers(folder / "cold", num_prompts)
    disk, data_dir = folder / "kv", folder / "data"
    size = str(DISK_BYTES_EACH * num_prompts)
    flags = (*SMALL, "--kv-disk", str(disk), "--kv-disk-size", size, "--data-dir", str(data_dir))
    for life in range(num_kills):
        process, log_path = start_quipu(folder / "server", *serve_command(*flags), "--port", "0")
        server = Server(process, log_path)
        try:
            if life and draw.random() < KILLED_AT_START:
                time.sleep(draw.uniform(0.0, 2.0))
                tally.num_kills_at_start += 1
                _kill(server, disk, tally)
            else:
                server.wait_listening(START_S)
                server.wait_ready(START_S)
                _serve_until_killed(server, cold, disk, draw, tally, most_answers)
        finally:
            process.kill()
            process.wait()
        tally.num_found += sum(opened["num_found"] for opened in server.events("kv_disk.opened"))
        if life % 10 == 9:
            print(f"{life + 1} kills: {attrs.asdict(tally)}", file=sys.stderr, flush=True)
    with serving(folder / "server", *flags) as server:
        for number in range(num_prompts):
            _check(server.url, number, cold, tally)
        _read_metrics(server, tally)
    with open_reader(data_dir=data_dir) as reader:
        records = [found.record for found in reader.records()]
    tally.num_records = len(records)
    tally.num_disputed += sum(record.disputed for record in records)
    return tally


def _serve_until_killed(
    server: Server, cold: list[Bits], disk: Path, draw: random.Random, tally: Tally, most_answers: int
) -> None:
    over = threading.Event()
    seed, hits_before = draw.random(), tally.cached[Tier.DISK]

    def keep_asking(client: int) -> None:
        own = random.Random(f"{seed} {client}")
        while not over.is_set():
            try:
                _check(server.url, own.randrange(len(cold)), cold, tally)
            except httpx.TransportError:
                if not over.is_set():
                    raise
                tally.num_unanswered += 1

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(keep_asking, client) for client in range(NUM_CLIENTS)]
        try:
            # a count, because on a busy machine little is done in a given time
            wanted = tally.num_answers + draw.randrange(most_answers)
            eventually(lambda: tally.num_answers >= wanted, "clients have answers")
            eventually(lambda: tally.num_found or _num_stored(server), "something is on the disk")
            _read_metrics(server, tally)
            time.sleep(draw.uniform(0.0, 0.1))
        finally:
            over.set()
            _kill(server, disk, tally)
        for client in clients:
            client.result()
    tally.num_lives_with_hits += tally.cached[Tier.DISK] > hits_before


def _check(url: str, number: int, cold: list[Bits], tally: Tally) -> None:
    bits, by_tier = ask(url, number)
    tally.num_answers += 1
    tally.num_wrong += bits != cold[number]
    tally.cached.update(by_tier)


def _num_stored(server: Server) -> float:
    return server.metrics()['kv_tier_stored_blocks_total{tier="disk"}']


def _read_metrics(server: Server, tally: Tally) -> None:
    """Note what only the server knows, which it forgets when it is killed."""
    metrics = server.metrics()
    tally.num_disputed += int(metrics["usage_disputed_total"])
    tally.num_corrupt += int(metrics['kv_tier_corrupt_total{tier="disk"}'])


def _kill(server: Server, disk: Path, tally: Tally) -> None:
    """Kill all processes of a server, and wait until they are gone."""
    pids = [server.pid, *_descendants(server.pid)]
    now = time.time()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait()
    for pid in pids:
        eventually(lambda pid=pid: has_ended(pid), "a process that was killed ends")
    tally.num_kills += 1
    written = [path.stat().st_mtime for path in disk.glob("engine-*/*")]
    tally.num_kills_at_store += bool(written) and now - max(written) < RECENT_S


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.server_kills", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="quipu-server-kills-") as folder:
        tally = kill_repeatedly(Path(folder), num_kills=arguments.kills, seed=arguments.seed)
    print(json.dumps(attrs.asdict(tally), indent=2))
    return 0 if tally.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
