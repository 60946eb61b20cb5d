"""What a routing decision costs: quipu's index and cost beside a plain port of Dynamo's, on the same caches.

Every engine holds chains of `CHAIN_BLOCKS` blocks. They begin with blocks that all engines hold; the rest of a chain is
held by one engine, its first half by two. A prompt is one of the chains. Another prompt, which begins like all of them,
is on its way to each engine. Both routers make a few decisions in turn: right after the other's, which touches several
megabytes, the first one takes three times as long.
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence

import attrs

from bench.routing.peer_index import TreeRouter
from quipu.actors.router.key_index import KeyIndex
from quipu.actors.router.routing import Routing

CHAIN_BLOCKS = 2000
SHARED_BLOCKS = 200
WAITING_BLOCKS = 500
KEY_BYTES = 32
IN_A_ROW = 20


@attrs.frozen
class Size:
    num_engines: int
    blocks_each: int


SIZES = (Size(64, 100_000), Size(1000, 2000))
QUICK = (Size(4, 4000),)


def measure(size: Size, num_decisions: int) -> dict[str, float]:
    """Return both routers' medians in microseconds."""
    rng = random.Random(7)
    num_blocks = min(CHAIN_BLOCKS, size.blocks_each)
    shared = [rng.randbytes(KEY_BYTES) for _ in range(SHARED_BLOCKS)]
    routing = Routing(block_size=16, prefill_budget=8192)
    slots = [routing.add_engine(size.blocks_each) for _ in range(size.num_engines)]
    peer = TreeRouter(size.num_engines)
    prompts: list[list[bytes]] = []
    for place in range(size.num_engines):
        for number in range(max(1, size.blocks_each // num_blocks)):
            chain = shared + [rng.randbytes(KEY_BYTES) for _ in range(num_blocks - SHARED_BLOCKS)]
            beside = (place + 1) % size.num_engines
            for holder, part in ((place, chain), (beside, chain[: num_blocks // 2])):
                routing.on_stored(slots[holder], part)
                peer.index.store(holder, part)
            if number == 0:
                prompts.append(chain)
        routing.sent.add(slots[place], shared + [rng.randbytes(KEY_BYTES) for _ in range(WAITING_BLOCKS)])
    num_tokens = 16 * num_blocks + 1

    def ours(keys: Sequence[bytes]) -> None:
        routing.drop(routing.route(keys, num_tokens))

    def theirs(keys: Sequence[bytes]) -> None:
        peer.choose(keys, num_blocks + 1)

    times: dict[str, list[float]] = {"quipu_us": [], "dynamo_us": []}
    for _ in range(-(-num_decisions // IN_A_ROW)):
        routed = rng.choices(prompts, k=min(num_decisions, IN_A_ROW))
        for choose, name in ((ours, "quipu_us"), (theirs, "dynamo_us")):
            for keys in routed:
                _time(choose, keys, times[name])
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "engines": size.num_engines,
        "blocks_each": size.blocks_each,
        "prompt_blocks": num_blocks,
        **{name: round(value, 1) for name, value in medians.items()},
        "ratio": round(medians["dynamo_us"] / medians["quipu_us"], 1),
    }


def bytes_of_an_entry(num_keys: int = 100_000) -> int:
    """Return the memory of one block that one engine holds."""
    rng = random.Random(8)
    tracemalloc.start()
    index = KeyIndex()
    slot = index.take_slot()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(num_keys):
        index.store(slot, [rng.randbytes(KEY_BYTES)])
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return round(used / num_keys)


def _time(call: Callable[[Sequence[bytes]], None], keys: Sequence[bytes], times: list[float]) -> None:
    began = time.perf_counter()
    call(keys)
    times.append(1e6 * (time.perf_counter() - began))
