"""Kill processes that write to a disk store, and check what they leave.

    OPENBLAS_NUM_THREADS=1 python -m tests.actors.engine.mover.disk_kills [--kills 100] [--seed 0] [--block-bytes 8192]

A process opens the store and writes block after block, many times as many as there is room for, and says after each
call what it has written. It is killed at a drawn moment, and the next one continues where it was. After each kill,
everything that is found reads right, and of what was reported as written, nothing is missing that has not been
overwritten since. Processes are forked, so this must be the only thread.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import attrs

from quipu.actors.engine.mover.disk_store import DiskStore

from .disk_bench import open_store, read, write

NUM_BLOCKS = 128
TOGETHER = 3
MOST_CALLS = 50
"""Before a kill."""


@attrs.frozen
class Kills:
    """What was seen."""

    num_kills: int
    num_calls: int
    """Calls that had returned."""
    num_found: int
    """Blocks, after all kills together."""
    num_torn: int
    """Kills after which files ended with an incomplete record, or had none, and were cut or deleted."""


def write_until_killed(path: Path, block_bytes: int, first: int, report: int) -> NoReturn:
    """Open the store and write blocks, named from `first` on; write the name of the last to a pipe after each call."""
    store = open_store(path, num_blocks=NUM_BLOCKS, block_bytes=block_bytes)
    slot = store.blank.start if store.blank else next_segment(store)
    name = first
    while True:
        slots = [(slot + at) % store.num_slots for at in range(TOGETHER)]
        write(store, slots, range(name, name + TOGETHER), block_bytes)
        name += TOGETHER
        os.write(report, b"%d\n" % (name - 1))
        slot = (slots[-1] + 1) % store.num_slots


def next_segment(store: DiskStore) -> int:
    """Return the first slot of the segment that is written next: a blank one, otherwise the oldest."""
    if not store.stored:
        return 0
    per_segment = store.blocks_per_segment
    return (store.stored[-1].slot // per_segment + 1) * per_segment % store.num_slots


def run_and_kill(path: Path, block_bytes: int, first: int, draw: random.Random) -> list[int]:
    """Have a process write, kill it at a drawn moment, and return what it said that it had written."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_until_killed(path, block_bytes, first, writable)
        finally:
            os._exit(1)
    os.close(writable)
    with os.fdopen(readable) as said:
        began_s = time.monotonic()
        lines = [said.readline() for _ in range(draw.randrange(MOST_CALLS))]
        call_s = (time.monotonic() - began_s) / max(len(lines), 1)
        time.sleep(draw.uniform(0.0, 2 * call_s))
        os.kill(pid, signal.SIGKILL)
        lines += said.readlines()
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError("a writer ended by itself")
    return [int(line) for line in lines if line.endswith("\n")]


def kill_and_check(path: Path, num_kills: int, seed: int, block_bytes: int) -> Kills:
    """Run writers and kill them. Raises AssertionError if something that is found is wrong, or something is missing."""
    draw = random.Random(seed)
    first = num_calls = num_found = num_torn = 0
    for number in range(num_kills):
        said = run_and_kill(path, block_bytes, first, draw)
        num_calls += len(said)
        last = max(said, default=first - 1)
        left = sizes_of(path)
        store = open_store(path, num_blocks=NUM_BLOCKS, block_bytes=block_bytes)
        try:
            num_torn += sizes_of(path) != left
            found = [name for stored in store.stored for name in read(store, [stored.slot], block_bytes)]
            names = [int.from_bytes(stored.key, "big") for stored in store.stored]
            assert found == names, f"kill {number}: not all are right"
            assert names == sorted(names), f"kill {number}: not oldest first"
            # the segments of the call that was in progress may have been begun anew
            room = store.num_slots - 2 * store.blocks_per_segment - TOGETHER
            missing = {*range(max(0, last + 1 - room), last + 1)} - {*names}
            assert not missing, f"kill {number}: {sorted(missing)} are missing"
            num_found += len(found)
            first = max([last, *names]) + 1  # each name is used once
        finally:
            store.close()
    return Kills(num_kills, num_calls, num_found, num_torn)


def sizes_of(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.glob("engine-0/segment-*")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill processes that write to a disk store, and check what they leave."
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-bytes", type=int, default=8192)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(kill_and_check(Path(folder), arguments.kills, arguments.seed, arguments.block_bytes))


if __name__ == "__main__":
    main()
