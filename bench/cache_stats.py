"""How close `GET /v1/cache/stats` is to exact stack distances, and what it costs.

    python -m bench.cache_stats TRACE [--capacity 20000] [--block-tokens 512] [--limit N] [--json]
    python -m bench.cache_stats --quick [--json]

A trace is a file as `bench.trace_replay` reads it. It is replayed through the real scheduler and block manager with
`--capacity` blocks; then the prompts go, with what they found, through the cache watch of the web process. Rows:

- `sizes`: blocks for a share of the hits of an infinite cache, as estimated and exactly, and the share of those hits
  that the real block manager has with as many blocks, one request at a time;
- `bound`: hits of an infinite cache, as estimated and exactly;
- `time`: what following the blocks costs (`sketch_ms`), and all that is done for a prompt (`watch_ms`), beside the
  block manager's time for the same prompts. All of it runs in the web process, none of it in an engine;
- `memory`: of the watch when it follows as many tenants as it ever does, each with its next sketch beside. The prefix
  tree, which has bounds of its own, is not in `time` and `memory`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import attrs

from bench.stack_distances import exact_distances, quantile
from bench.trace_replay import (
    Setting,
    TracedRequest,
    make_engine,
    positive,
    read_trace,
    replay,
    replay_in_time,
    worst_case_blocks,
)
from quipu.actors.cache_insight.cache_figures import SHARES
from quipu.actors.cache_insight.cache_watch import (
    MAX_FOLLOWED,
    MAX_ROWS,
    REGISTER_BITS,
    SAMPLED_KEYS,
    CacheWatch,
    WatchedPrompt,
)
from quipu.actors.cache_insight.prefix_tree import NOBODY, Branch, Passage, PrefixTree
from quipu.actors.cache_insight.reuse_sketch import make_sketch
from quipu.actors.cache_insight.reuse_window import WINDOWS

QUICK_PROMPTS = 100
REPEATS = 5
MIB = 1 << 20


@attrs.frozen
class Served:
    """The trace after its replay: prompts in the order of their admissions."""

    prompts: list[list[bytes]]
    num_found: list[int]
    """Blocks."""
    manager_s: float


def made_trace(num_prompts: int, block_tokens: int, seed: int = 1) -> list[TracedRequest]:
    """Return conversations that begin alike, one request each second."""
    rng = random.Random(seed)
    heads, next_id = [[0, 1]], 2
    requests: list[TracedRequest] = []
    for second in range(num_prompts):
        ids = rng.choice(heads[-100:]) + list(range(next_id, next_id + rng.randint(1, 20)))
        next_id += 20
        heads.append(ids)
        requests.append(TracedRequest(float(second), len(ids) * block_tokens + 1, 4, ids))
    return requests


def serve(requests: Sequence[TracedRequest], setting: Setting) -> Served:
    """Replay the trace through scheduler and block manager."""
    engine = make_engine(list(requests), setting)
    replay_in_time(engine, list(requests), setting)
    digests: dict[int, bytes] = {}
    prompts: list[list[bytes]] = []
    for index in engine.reused:
        request = requests[index]
        ids = request.hash_ids[: request.num_prompt_tokens // setting.block_tokens]
        for i in ids:
            if i not in digests:
                digests[i] = hashlib.sha256(i.to_bytes(8, "little")).digest()
        prompts.append([digests[i] for i in ids])
    return Served(
        prompts,
        [tokens // setting.block_tokens for tokens in engine.reused.values()],
        engine.manager_ns / 1e9,
    )


def sketch_s(served: Served) -> float:
    """Return the seconds that following the blocks takes."""
    sketch = make_sketch(SAMPLED_KEYS, REGISTER_BITS)
    began = time.perf_counter()
    for keys, num_found in zip(served.prompts, served.num_found, strict=True):
        sketch.access(keys, num_found, len(keys), 0, 1)
    return time.perf_counter() - began


def watched(served: Served, block_tokens: int) -> tuple[CacheWatch, float]:
    """Return the watch after all prompts, and the seconds that it has taken."""
    watch = CacheWatch(block_size=block_tokens, clock=lambda: 0.0, tree=NoTree())
    prompts = [
        # one token more than the blocks: each of them could have been found
        WatchedPrompt("trace", "demo", len(keys) * block_tokens + 1, num_found * block_tokens, keys)
        for keys, num_found in zip(served.prompts, served.num_found, strict=True)
    ]
    began = time.perf_counter()
    for prompt in prompts:
        watch.on_prompt(prompt, 0.0)
    return watch, time.perf_counter() - began


NO_BRANCH = Branch(None, [], 0, 0.0, 0.0)


class NoTree(PrefixTree):
    """Keeps nothing."""

    def begin(
        self, tenant: str, sequence_ids: Iterable[int], keys: Sequence[bytes], now: float, passage: Passage = NOBODY
    ) -> Branch:
        return NO_BRANCH


def memory(num_prompts: int, num_rows: int = MAX_ROWS) -> dict[str, float]:
    """Return the memory of a watch with `num_rows`, by default as many as it ever has, and as many sketches."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    watch = CacheWatch(tree=NoTree())
    for tenant in range(num_rows):
        for number in range(num_prompts if tenant < MAX_FOLLOWED else 1):
            keys = [hashlib.sha256(f"{tenant} {number} {i}".encode()).digest() for i in range(1000)]
            # the last window before sketches are renewed: each has its successor beside
            now = watch.window_s * (0.0 if number == 0 else WINDOWS - number / num_prompts)
            watch.on_prompt(WatchedPrompt(str(tenant), "demo", 16_001, 0, keys), now)
    python = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"rows": num_rows, "followed": MAX_FOLLOWED, "mib": round((python + watch.num_bytes) / MIB, 1)}


def measure(requests: Sequence[TracedRequest], setting: Setting, *, is_quick: bool) -> dict[str, Any]:
    served = serve(requests, setting)
    if not is_quick:  # the better of two, as other load on the machine lengthens either
        served = min(served, serve(requests, setting), key=attrgetter("manager_s"))
    distances, num_blocks = exact_distances(served.prompts)
    times = [(sketch_s(served), watched(served, setting.block_tokens)[1]) for _ in range(1 if is_quick else REPEATS)]
    sketch, watch_s = (min(column) for column in zip(*times, strict=True))
    reuse = watched(served, setting.block_tokens)[0].overall().reuse
    assert reuse is not None
    sizes: list[dict[str, Any]] = []
    for share in SHARES:
        exact, blocks = quantile(distances, share), reuse.blocks[share]
        row: dict[str, Any] = {"share": share, "blocks": blocks, "exact": exact}
        row["error"] = None if blocks is None else round(blocks / exact - 1, 4)
        if not is_quick and blocks is not None:
            at = attrs.evolve(setting, capacity=blocks, sequential=True, decode_outputs=False)
            row["replayed_share"] = round(replay(list(requests), at)["hit_blocks"] / len(distances), 4)
        sizes.append(row)
    return {
        "prompts": len(served.prompts),
        "blocks": num_blocks,
        "sampled_share": reuse.sampled_share,
        "sizes": sizes,
        "bound": {
            "hits": reuse.hit_blocks,
            "exact": len(distances),
            "error": round(reuse.hit_blocks / len(distances) - 1, 4),
        },
        "time": {
            "manager_ms": round(1000 * served.manager_s, 2),
            "sketch_ms": round(1000 * sketch, 2),
            "sketch_of_manager": round(sketch / served.manager_s, 4),
            "watch_ms": round(1000 * watch_s, 2),
            "watch_us_per_prompt": round(1e6 * watch_s / len(served.prompts), 2),
        },
        "memory": memory(2, MAX_FOLLOWED) if is_quick else memory(20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cache_stats", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, metavar="TRACE", nargs="?")
    parser.add_argument("--capacity", type=positive, default=20_000, metavar="BLOCKS", help="(default: %(default)s)")
    parser.add_argument("--block-tokens", type=positive, default=512, help="tokens in a block (default: %(default)s)")
    parser.add_argument("--limit", type=positive, help="replay only the first LIMIT requests")
    parser.add_argument("--quick", action="store_true", help="smoke test: a made-up trace")
    parser.add_argument("--json", action="store_true", help="print the object on one line")
    arguments = parser.parse_args()
    if not arguments.quick and arguments.trace is None:
        parser.error("a TRACE is required, or --quick")
    try:
        requests = (
            made_trace(QUICK_PROMPTS, arguments.block_tokens)
            if arguments.quick
            else read_trace(arguments.trace, arguments.limit)
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    setting = Setting(capacity=min(arguments.capacity, worst_case_blocks(requests, arguments.block_tokens)))
    setting = attrs.evolve(setting, block_tokens=arguments.block_tokens)
    gc.collect()
    gc.freeze()  # as the web process does after start-up
    gc.set_threshold(50_000, 20, 1000)
    report = measure(requests, setting, is_quick=arguments.quick)
    print(json.dumps(report, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
