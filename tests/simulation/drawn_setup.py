"""Draws how the server of a seed runs."""

from __future__ import annotations

import random
from typing import Any

import attrs

from tests.simulation.aims import OF_OBJECTS, OF_PEERS, OF_SEVERAL, OF_TIERS
from tests.simulation.arrival import ADAPTERS, BLOCK, FIRST_ID, SLOT_BYTES

SMALL_SEGMENT = 128 << 10
"""Bytes of a segment of the ledger that a run fills, if the first lines are long..."""
NEARLY_FULL = 30_000
"""...such as these, which leave room for a few requests..."""
HALF_FULL = 12_000
"""...or these, for as many as do not allow for their ends, and for no spare segment yet."""
WAITING_TOKENS = (16, 28, 40)
"""Prompt tokens of some of a crowd."""
CROWDED_BLOCKS = 26
"""Blocks that two sequences of a crowd need."""
QUOTA_BLOCKS = 12
"""Blocks that a tenant may have in a tier, where there is a limit."""
LOAD_COSTS = '{"compute_s": 0.001, "latency_s": {"disk": 0.001}, "block_s": {"disk": 0.01}}'
"""With which what is on the host is loaded, and what is on a disk is computed again."""


@attrs.frozen
class Setup:
    """How the server runs."""

    num_engines: int
    engine: dict[str, Any]
    """Settings of the engine and the web process, by name."""
    host_blocks: int
    """Blocks of the tier on the host; 0: there is none."""
    disk_blocks: int
    """The same of the tier on a disk, for each engine."""
    has_objects: bool
    """Whether there is an object store, which engines share."""
    has_adapters: bool
    fsync: bool
    segment_bytes: int
    ledger_padding: int
    """Bytes of each of the ledger's first lines."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers below the device."""
        are_there = {"host": self.host_blocks, "disk": self.disk_blocks, "remote": self.has_objects}
        return tuple(name for name, is_there in are_there.items() if is_there)

    @property
    def drafts(self) -> bool:
        """Whether the fake executor guesses tokens."""
        return bool(self.engine["fake_most_tokens"] > 1)


def draw_setup(rng: random.Random, message: str) -> Setup:
    """Draw settings with which a type of message may be sent."""
    num_engines = rng.choice((2, 2, 3) if message in OF_SEVERAL | OF_PEERS else (1, 1, 1, 2, 2, 3))
    if message in OF_TIERS or message == "Unsent":
        num_engines = 1
    max_model_len = 24 * BLOCK
    engine: dict[str, Any] = {
        "block_size": BLOCK,
        "max_model_len": max_model_len,
        "num_blocks": rng.choice((26, 26, 32) if message in OF_TIERS else (26, 32, 48, 64, 200, 600)),
        "max_num_seqs": rng.choice((2, 4, 8, 16)),
        "max_num_batched_tokens": rng.choice((16, 32, 64, 256)),
        "watermark": rng.choice((0.0, 0.01, 0.1, 0.2)),
        "long_prefill_token_threshold": rng.choice((0, 0, 0, 2 * BLOCK)),
        "max_waiting_requests": rng.choice((0, 0, 0, 0, 4)),
        "max_waiting_share": rng.choice((1.0, 0.5)),
        "scheduling_policy": rng.choice(("fcfs", "fcfs", "priority", "fair")),
        "max_steps_in_flight": rng.choice((1, 2, 2)),
        "share_pending_prefixes": rng.random() < 0.8,
        "enable_prefix_caching": rng.random() < 0.95,
        "step_overhead_tokens": rng.choice((0, 0, 512)),
        "fake_most_tokens": rng.choice((1, 1, 1, 2, 4)),
        "eos_token_ids": (FIRST_ID + 3,) if rng.random() < 0.3 else (),
        "num_engines": num_engines,
        "routing": rng.choice(("prefix", "prefix", "dynamo", "least-loaded", "round-robin", "random")),
        "submit_slots": rng.choice((2, 2, 16) if message == "Unsent" else (2, 16, 256)),
        "encode_slots": rng.choice((1, 4, 256)),
        "report_slots": rng.choice((1, 2, 16)),
        "max_restarts": 1_000_000,
        "step_timeout_s": rng.choice((0.0, 2.0)),
    }
    if num_engines > 1 and (message in OF_PEERS or rng.random() < 0.4):
        engine["has_peers"] = True
        engine["prefill_local_tokens"] = rng.choice((0, 0, 2 * BLOCK))
        engine["engine_roles"] = ("prefill", "decode", "mixed")[:num_engines]
    elif rng.random() < 0.2:
        engine["on_engine_death"] = "fail"
    if engine["scheduling_policy"] == "fair" or engine["max_waiting_requests"]:  # then crowds tell something
        num_seqs = 4 if engine["num_blocks"] > 2 * CROWDED_BLOCKS else 2
        engine |= {"max_num_seqs": num_seqs, "submit_slots": 256, "encode_slots": 256}
    if rng.random() < 0.4:
        engine |= {"kv_load": "auto", "kv_load_costs": LOAD_COSTS}
    if rng.random() < 0.3:
        engine["kv_store"] = "reused"
    if rng.random() < 0.3:
        engine["kv_quota"] = QUOTA_BLOCKS * BLOCK * SLOT_BYTES
    has_adapters = message == "DropAdapter" or (message not in OF_TIERS and rng.random() < 0.2)
    if has_adapters:
        engine["max_loras"] = len(ADAPTERS)
    host_blocks = rng.choice((16, 64) if message in OF_TIERS else (0, 0, 16, 64))
    return Setup(
        num_engines=num_engines,
        engine=engine,
        host_blocks=host_blocks,
        disk_blocks=rng.choice((24, 96)) if rng.random() < (0.4 if host_blocks else 0.15) else 0,
        has_objects=message in OF_OBJECTS or rng.random() < 0.1,
        has_adapters=has_adapters,
        fsync=rng.random() < 0.5,
        segment_bytes=rng.choice((SMALL_SEGMENT, 1 << 18)),
        ledger_padding=rng.choice((0, 27_000, NEARLY_FULL)),
    )


def with_small_window(rng: random.Random, setup: Setup) -> Setup:
    """Have engines hold few sequences of a request at a time, now and then."""
    if rng.random() < 0.7:
        return setup
    return attrs.evolve(setup, engine={**setup.engine, "submit_window": rng.choice((1, 2, 3))})


def with_waiting_tokens(rng: random.Random, setup: Setup) -> Setup:
    """Limit the prompt tokens that may wait where the number of requests is limited, now and then."""
    if not setup.engine["max_waiting_requests"] or rng.random() < 0.5:
        return setup
    return attrs.evolve(setup, engine={**setup.engine, "max_waiting_tokens": rng.choice(WAITING_TOKENS)})
