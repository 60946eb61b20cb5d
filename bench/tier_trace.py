"""Replay a trace through an engine with a host tier and a disk: which share of the prompts is found, and where.

    python -m bench.tier_trace TRACE [--json] [--requests N] [--device 1000 5000] [--host 2000] [--disk 50000]
    python -m bench.tier_trace --quick [--json]

Scheduler, block manager, executor and mover are the real ones, and the disk's files are real; the backend is the fake
one, with small blocks, each of which stands for one block of the trace. Requests are sent one at a time, and what waits
to be stored is stored before the next, as at any rate of arrivals that the disk can follow.

A row for each size of the device's pool. `hits` is the number of blocks found, by tier; `share` is that of what an
infinite cache finds, and `of_oracle` that of a cache which evicts the block used longest ago and has as many blocks as
all tiers together. `after_restart` is the share of the hits in the second half of the trace that remains when the
engine is ended in the middle and started again with the same files. `written_per_read`: bytes written to the disk for
each byte read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import trio
import trio.lowlevel

from bench.driven_engine import DrivenEngine, running
from bench.trace_replay import QUICK_TRACE, TracedRequest, read_trace
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import Engine
from quipu.actors.messages.tiers import Tier
from quipu.kernels.fake_blocks import SLOT_BYTES

BLOCK_SIZE = 2
BLOCK_BYTES = SLOT_BYTES * BLOCK_SIZE
RECORD_BYTES = 8192
"""Of a small block on the disk: a page for its header, and one for itself."""


@attrs.frozen
class Sizes:
    """Blocks of each tier."""

    device: int
    host: int
    disk: int


@attrs.define
class Found:
    """What prompts found, in blocks."""

    by_tier: Counter[str] = attrs.field(factory=Counter)
    in_second_half: int = 0
    num_disk_slots: int = 0
    num_written: int = 0
    num_read: int = 0

    @property
    def num(self) -> int:
        return sum(self.by_tier.values())


def infinite_hits(requests: Sequence[TracedRequest]) -> int:
    """Return how many blocks an infinite cache would find."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += _leading(request.hash_ids, seen)
        seen.update(request.hash_ids)
    return hits


def oracle_hits(requests: Sequence[TracedRequest], num_blocks: int) -> int:
    """Return how many blocks a cache of this size finds that evicts the block which was used longest ago."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += _leading(request.hash_ids, cached)
        for hash_id in reversed(request.hash_ids):  # a chain is evicted from its end
            cached[hash_id] = None
            cached.move_to_end(hash_id)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    return hits


def _leading(hash_ids: Sequence[int], cached: Any) -> int:
    """Return how many leading blocks of a prompt are cached. The first token after them is always computed."""
    return next((at for at, hash_id in enumerate(hash_ids) if hash_id not in cached), len(hash_ids))


def config_of(sizes: Sizes, longest: int, folder: Path) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        load_format="dummy",
        executor="fake",
        fake_step_seconds=0.0,
        fake_token_id=1,
        block_size=BLOCK_SIZE,
        num_blocks=max(sizes.device, longest + 1) + 1,
        max_model_len=(longest + 2) * BLOCK_SIZE,
        max_num_batched_tokens=(longest + 2) * BLOCK_SIZE,
        kv_host_memory=sizes.host * BLOCK_BYTES if sizes.host else None,
        kv_disk=str(folder / "kv"),
        kv_disk_size=sizes.disk * RECORD_BYTES,
        kv_load="always",  # computing takes no time here
        eos_token_ids=(),
        watermark=0.0,
    )


async def _settle(engine: Engine) -> None:
    """Wait until nothing is being stored, and nothing waits to be."""
    tiers = engine.block_manager.tiers
    assert tiers is not None
    while tiers.stores.are_under_way:
        await trio.lowlevel.checkpoint()


async def replay(requests: Sequence[TracedRequest], sizes: Sizes, *, restarts: bool = False) -> Found:
    """Send the prompts one at a time. With `restarts`, end the engine in the middle and start it again."""
    found = Found()
    longest = max(len(request.hash_ids) for request in requests)
    half = len(requests) // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text("{}")
        config = config_of(sizes, longest, folder)
        for begin, end in [(0, half), (half, len(requests))] if restarts else [(0, len(requests))]:
            async with running(config) as engine:
                for index in range(begin, end):
                    await _ask(engine, requests[index], found, is_late=index >= half)
                tiers = engine.engine.block_manager.tiers
                assert tiers is not None
                found.num_disk_slots = tiers.by_tier[Tier.DISK].index.num_slots
            found.num_written += engine.num_moved["stored", "disk"]
            found.num_read += engine.num_moved["loaded", "disk"]
    return found


async def _ask(engine: DrivenEngine, request: TracedRequest, found: Found, *, is_late: bool) -> None:
    prompt = [part for hash_id in request.hash_ids for part in (2 + hash_id % (1 << 30), 2)]
    (served,) = await engine.ask([*prompt, 2])
    await _settle(engine.engine)
    for tier, num_tokens in served.by_tier.items():
        found.by_tier[tier] += num_tokens // BLOCK_SIZE
        found.in_second_half += is_late * num_tokens // BLOCK_SIZE


async def measure(requests: Sequence[TracedRequest], all_sizes: Sequence[Sizes]) -> dict[str, Any]:
    most = infinite_hits(requests)
    rows = []
    for sizes in all_sizes:
        found = await replay(requests, sizes)
        restarted = await replay(requests, sizes, restarts=True)
        oracle = oracle_hits(requests, sizes.device + sizes.host + found.num_disk_slots)
        rows.append(
            {
                "device": sizes.device,
                "host": sizes.host,
                "disk": found.num_disk_slots,
                "hits": dict(found.by_tier),
                "share": found.num / most,
                "of_oracle": found.num / oracle,
                "after_restart": restarted.in_second_half / found.in_second_half,
                "written_per_read": found.num_written / found.num_read if found.num_read else None,
            }
        )
    num_blocks = sum(len(request.hash_ids) for request in requests)
    return {"requests": len(requests), "blocks": num_blocks, "infinite_hits": most, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tier_trace", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: three requests")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--device", type=int, nargs="+", default=[1000, 5000], metavar="BLOCKS")
    parser.add_argument("--host", type=int, default=2000, metavar="BLOCKS")
    parser.add_argument("--disk", type=int, default=50_000, metavar="BLOCKS")
    arguments = parser.parse_args()
    if arguments.trace is None and not arguments.quick:
        parser.error("a trace is needed, or --quick")
    requests = QUICK_TRACE if arguments.quick else read_trace(arguments.trace, arguments.requests)
    all_sizes = [Sizes(device, arguments.host, arguments.disk) for device in arguments.device]
    if arguments.quick:
        all_sizes = [Sizes(4, 2, 16)]
    with contextlib.redirect_stdout(sys.stderr):  # what engines log
        report = trio.run(measure, requests, all_sizes)
    if arguments.json:
        print(json.dumps(report))
        return
    print(f"{report['requests']} requests, {report['blocks']} blocks, {report['infinite_hits']} found without limits")
    for row in report["rows"]:
        hits = ", ".join(f"{tier} {num}" for tier, num in row["hits"].items())
        per_read = "-" if row["written_per_read"] is None else f"{row['written_per_read']:.2f}"
        print(
            f"device {row['device']:6} host {row['host']:6} disk {row['disk']:6}: {row['share']:.3f} of an infinite "
            f"cache's, {row['of_oracle']:.3f} of an oracle's, {row['after_restart']:.3f} after a restart, "
            f"{per_read} bytes written per byte read ({hits})"
        )


if __name__ == "__main__":
    main()
