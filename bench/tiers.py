"""Measure what tiers below the device cost a step, and how soon a prompt answers whose KV lies there.

    python -m bench.tiers [--json] [--quick] [--rounds 7] [--layers 28] [--tokens 4096] [--executor cpu]

Engines run in this process, with dummy weights in the shape of Qwen3-0.6B: scheduler, block manager, executor and
mover, without the web side. All numbers are of one run.

`store_prefill` and `store_decode_8`: how much longer a step takes, as a fraction, in an engine that stores what it
evicts than in one that has no host tier. Both are given the same prompts by turns, none of which they have seen, with
caches that are full: each block that is computed evicts one, which the first has stored. A row is the median of the
ratios of the pairs.

`first_token_host`: one prompt lies on the device, on the host or nowhere (`computed_ms`, for comparison), and is asked
for one token. `value` is the time to that token from the host minus that from the device, divided by the time of a
plain copy: `write_blocks` of as many blocks, right after it, by the thread that runs everything else. The median of the
rounds.

`first_token_disk`: likewise for a prompt that lies on the disk, divided by the time to its first token if it is
computed. Files are read past the page cache wherever the file system allows it, so that a prompt is never read faster
than when it was stored long ago.

`store_disk_p99`: the 99th percentile of the time of a step in which eight sequences decode, in an engine that stores
what it computes on a disk, divided by that in one that stores nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# the same setting as in the server's engine process; torch reads it once, when it loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import attrs
import trio

from bench.driven_engine import DrivenEngine, Served, running
from bench.shapes import QWEN3_06B as SHAPE
from bench.shapes import TINY
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import Engine
from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.messages.tiers import Tier

BLOCK_SIZE = 16
NUM_DECODING = 8
LIMITS = {
    "store_prefill": 0.02,
    f"store_decode_{NUM_DECODING}": 0.02,
    "first_token_host": 1.3,
    "first_token_disk": 0.5,
    "store_disk_p99": 1.05,
}


@attrs.frozen
class Sizes:
    """What is measured, in tokens."""

    prompt: int
    """Of the prompt that lies on the host."""
    prefill: int
    """Of each prompt of a pair."""
    decode: int
    """Of each output."""
    rounds: int


class Prompts:
    """Prompts that no engine has seen."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def next(self, num_tokens: int) -> list[int]:
        return self._draw.choices(range(1000, SHAPE["vocab_size"]), k=num_tokens)


def config_of(
    folder: Path, executor: str, num_blocks: int, host_bytes: int | None, disk_bytes: int | None = None
) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        load_format="dummy",
        executor=executor,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        kv_host_memory=host_bytes,
        kv_disk=None if disk_bytes is None else str(folder / "kv"),
        kv_disk_size=disk_bytes,
        kv_load="always",
        max_model_len=(num_blocks - 1) * BLOCK_SIZE,
        eos_token_ids=(),
    )


def block_bytes() -> int:
    return 2 * 2 * int(SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]) * BLOCK_SIZE


# ---------------------------------------------------------------- what storing costs


async def measure_stores(folder: Path, sizes: Sizes, executor: str) -> list[dict[str, Any]]:
    """Return the rows about steps."""
    num_blocks = 2 * max(sizes.prefill, NUM_DECODING * (sizes.decode + BLOCK_SIZE)) // BLOCK_SIZE + 8
    host_bytes = 2 * num_blocks * block_bytes()
    async with (
        running(config_of(folder, executor, num_blocks, None)) as without,
        running(config_of(folder, executor, num_blocks, host_bytes)) as storing,
    ):
        engines, prompts = (without, storing), Prompts()
        for _ in range(4):  # until the caches are full, and every page was touched
            prompt = prompts.next(sizes.prefill)
            for engine in engines:
                await engine.ask(prompt)
        prefill, decode = [], []
        for index in range(sizes.rounds):
            order = engines if index % 2 else engines[::-1]
            prompt = prompts.next(sizes.prefill)
            prefill.append({engine: _step_s(await engine.ask(prompt)) for engine in order})
            several = [prompts.next(BLOCK_SIZE) for _ in range(NUM_DECODING)]
            decode.append({engine: _step_s(await engine.ask(*several, max_tokens=sizes.decode)) for engine in order})
        assert _num_on_host(storing.engine) > num_blocks // 2
    rows = []
    for name, pairs in (("store_prefill", prefill), (f"store_decode_{NUM_DECODING}", decode)):
        rows.append(
            {
                "name": name,
                "value": statistics.median(pair[storing] / pair[without] for pair in pairs) - 1,
                "unit": "of a step",
                "limit": LIMITS[name],
                "step_ms": statistics.median(pair[without] for pair in pairs) * 1000,
                "storing_step_ms": statistics.median(pair[storing] for pair in pairs) * 1000,
            }
        )
    return rows


def _step_s(served: list[Served]) -> float:
    """Return the mean time of a step of requests that were served beside each other."""
    last = max(served, key=lambda one: one.end_s)
    return last.end_s / last.num_steps


# ---------------------------------------------------------------- what loading costs


async def measure_first_token(folder: Path, sizes: Sizes, executor: str) -> dict[str, Any]:
    """Return the row about a prompt that lies on the host."""
    prompt_blocks = sizes.prompt // BLOCK_SIZE
    num_blocks = prompt_blocks + 2  # room for one prompt and nothing else, beside the null block
    host_bytes = 4 * num_blocks * block_bytes()
    copies: list[float] = []
    async with running(config_of(folder, executor, num_blocks, host_bytes)) as engine:
        times = await _first_tokens(engine, sizes, "host", lambda: copies.append(_copy_s(engine.engine, prompt_blocks)))
    rounds = zip(times["host"], times["device"], copies, strict=True)
    return {
        "name": "first_token_host",
        "value": statistics.median((host - device) / copy for host, device, copy in rounds),
        "unit": "plain copies beyond the device",
        "limit": LIMITS["first_token_host"],
        "tokens": sizes.prompt,
        "mib": prompt_blocks * block_bytes() / 2**20,
        **{f"{name}_ms": statistics.median(values) * 1000 for name, values in (times | {"copy": copies}).items()},
    }


async def _first_tokens(
    engine: DrivenEngine, sizes: Sizes, tier: str, after_round: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Return the times to the first token of a prompt that lies in a tier, on the device or nowhere (`computed`).

    The engine has room for one prompt: two take turns.
    """
    times: dict[str, list[float]] = {"device": [], tier: [], "computed": []}
    prompts = Prompts()
    pair = [prompts.next(sizes.prompt + 1) for _ in range(2)]
    for number, prompt in enumerate(pair, 1):
        (cold,) = await engine.ask(prompt)
        times["computed"].append(cold.first_token_s)
        await _settle(engine, tier, number * (sizes.prompt // BLOCK_SIZE))
    for index in range(sizes.rounds):
        (lower,) = await engine.ask(pair[index % 2])
        (device,) = await engine.ask(pair[index % 2])
        if lower.by_tier.get(tier) != sizes.prompt or device.by_tier.get(tier):
            raise RuntimeError(f"found {lower.by_tier} and then {device.by_tier}")
        times[tier].append(lower.first_token_s)
        times["device"].append(device.first_token_s)
        after_round()
    return times


# ---------------------------------------------------------------- the disk


async def measure_disk(folder: Path, sizes: Sizes, executor: str) -> list[dict[str, Any]]:
    """Return the rows about a disk."""
    return [await _first_token_disk(folder, sizes, executor), await _store_disk(folder, sizes, executor)]


async def _first_token_disk(folder: Path, sizes: Sizes, executor: str) -> dict[str, Any]:
    prompt_blocks = sizes.prompt // BLOCK_SIZE
    num_blocks = prompt_blocks + 2
    config = config_of(folder, executor, num_blocks, None, 4 * num_blocks * (block_bytes() + 8192))
    async with running(config) as engine:
        times = await _first_tokens(engine, sizes, "disk")
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "name": "first_token_disk",
        "value": (medians["disk"] - medians["device"]) / medians["computed"],
        "unit": "of computing it",
        "limit": LIMITS["first_token_disk"],
        "tokens": sizes.prompt,
        "mib": prompt_blocks * block_bytes() / 2**20,
        **{f"{name}_ms": value * 1000 for name, value in medians.items()},
    }


async def _store_disk(folder: Path, sizes: Sizes, executor: str) -> dict[str, Any]:
    num_blocks = 2 * NUM_DECODING * (sizes.decode + BLOCK_SIZE) // BLOCK_SIZE + 8
    disk_bytes = 8 * num_blocks * (block_bytes() + 8192)
    async with (
        running(config_of(folder, executor, num_blocks, None)) as without,
        running(config_of(folder, executor, num_blocks, None, disk_bytes)) as storing,
    ):
        prompts = Prompts()
        times: dict[DrivenEngine, list[float]] = {without: [], storing: []}
        for index in range(sizes.rounds + 1):
            order = (without, storing) if index % 2 else (storing, without)
            several = [prompts.next(BLOCK_SIZE) for _ in range(NUM_DECODING)]
            for engine in order:
                served = await engine.ask(*several, max_tokens=sizes.decode)
                if index:  # not the first, in which pages are touched
                    times[engine] += served[-1].step_s[NUM_DECODING:]
        num_stored = storing.num_moved["stored", "disk"]
        if not num_stored:
            raise RuntimeError("nothing was stored")
    p99 = {engine: sorted(values)[int(0.99 * len(values))] for engine, values in times.items()}
    return {
        "name": "store_disk_p99",
        "value": p99[storing] / p99[without],
        "unit": "of a step without a disk",
        "limit": LIMITS["store_disk_p99"],
        "stored_blocks": num_stored,
        "steps": len(times[storing]),
        "step_ms": p99[without] * 1000,
        "storing_step_ms": p99[storing] * 1000,
        "median_step_ms": statistics.median(times[without]) * 1000,
        "median_storing_step_ms": statistics.median(times[storing]) * 1000,
    }


async def _settle(engine: DrivenEngine, tier: str, num_stored: int) -> None:
    """Run steps that evict nothing until the engine knows of so many stored blocks: of all prompts that were served."""
    with trio.fail_after(60):
        while engine.num_moved["stored", tier] < num_stored:
            await engine.ask([1])


def _host_store(engine: Engine) -> HostStore:
    store = None if engine.carrier is None else engine.carrier.stores[Tier.HOST]
    assert isinstance(store, HostStore)
    return store


def _num_on_host(engine: Engine) -> int:
    return sum(header is not None for header in _host_store(engine).headers)


def _copy_s(engine: Engine, num_blocks: int) -> float:
    """Return the time to copy the host tier's first blocks to the device, to blocks that contain what they are given.

    The bytes that the blocks had are put back.
    """
    backend = engine.executor.backend
    store = _host_store(engine)
    blocks = list(range(1, num_blocks + 1))
    kept = backend.allocate_on_host(num_blocks)
    backend.read_blocks(blocks, kept)
    started = time.perf_counter()
    backend.write_blocks(blocks, store.bytes[: num_blocks * backend.memory_plan.block_bytes])
    seconds = time.perf_counter() - started
    backend.write_blocks(blocks, kept)
    return seconds


async def measure(sizes: Sizes, executor: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        rows = [
            await measure_first_token(folder, sizes, executor),
            *await measure_stores(folder, sizes, executor),
            *await measure_disk(folder, sizes, executor),
        ]
    return {"rows": rows, "layers": SHAPE["num_hidden_layers"], "rounds": sizes.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, two rounds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=28, help="fewer take less time to compute, and less memory")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt that lies on the host")
    parser.add_argument("--executor", choices=["auto", "cpu", "reference"], default="auto")
    arguments = parser.parse_args()
    SHAPE["num_hidden_layers"] = arguments.layers
    sizes = Sizes(prompt=arguments.tokens, prefill=1024, decode=64, rounds=arguments.rounds)
    if arguments.quick:
        SHAPE.update(TINY)
        sizes = Sizes(prompt=256, prefill=128, decode=16, rounds=2)
    with contextlib.redirect_stdout(sys.stderr):  # what engines log
        report = trio.run(measure, sizes, arguments.executor)
    if arguments.json:
        print(json.dumps(report))
        return
    print(f"{report['layers']} layers, {report['rounds']} rounds")
    for row in report["rows"]:
        parts = ", ".join(f"{name[:-3]} {value:.2f} ms" for name, value in row.items() if name.endswith("_ms"))
        print(f"{row['name']:20} {row['value']:8.3f} {row['unit']} (at most {row['limit']}): {parts}")


if __name__ == "__main__":
    main()
