"""A server with a host tier: how usage, metrics, log, events, look-ups, explanations and the tree report it.

It serves the tiny model with a cache that has room for one of the prompts at a time.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.e2e.servers import BLOCK, Server, eventually, serving
from tests.kv_mirror import Subscriber
from tests.processes import free_ports

LONG = [*range(300, 300 + 20 * BLOCK), 7]
"""A prompt with twenty blocks that can be reused."""
OTHERS = [list(range(first, first + 22 * BLOCK)) for first in (700, 1100, 1500)]
NONE = {"device": 0, "host": 0, "disk": 0, "remote": 0, "unattributed": 0}
DETAILS = {"return_cached_tokens_details": True}


def push_out(server: Server) -> None:
    """Wait until the first prompt is on the host, then send others until none of it is on the device."""

    def is_copied() -> bool:
        server.complete([7], max_tokens=1)  # a step that evicts nothing, whose report says what was stored before
        return server.metrics()['kv_tier_stored_blocks_total{tier="host"}'] >= 20

    eventually(is_copied, "the first prompt is on the host")
    for prompt in OTHERS:
        assert server.complete(prompt, max_tokens=1).status_code == 200


def look_up(server: Server, prompt: list[int]) -> Any:
    question = {"url": "/v1/completions", "body": {"model": "demo", "prompt": prompt}}
    (found,) = server.post("/v1/cache/lookup", question).json()["prompts"]
    return found


def test_prompt_that_lies_on_the_host(tmp_path: Path) -> None:
    """Its cached tokens are reported as the host's everywhere, its text is unchanged, and KV events describe it; an
    engine that dies takes its host tier along."""
    live, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": live, "replay_endpoint": replay})
    flags = (
        "--num-blocks",
        "26",
        "--kv-load",
        "always",
        "--kv-host-memory",
        "64MiB",
        "--log-level",
        "debug",
        "--kv-events-config",
        events,
    )
    with serving(tmp_path, *flags) as server, closing(Subscriber(live, replay, BLOCK)) as subscriber:
        assert server.get("/server_info").json()["settings"]["kv_host_memory"] == 64 << 20
        first = server.complete(LONG, **DETAILS).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == NONE
        push_out(server)

        found = look_up(server, LONG)
        assert found["cached_tokens"] == 20 * BLOCK, found
        assert found["cached_tokens_by_tier"] == NONE | {"host": 20 * BLOCK}
        before = server.metrics()
        again = server.complete(LONG, **DETAILS)
        assert again.json()["choices"][0]["text"] == first["choices"][0]["text"]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == NONE | {"host": 20 * BLOCK}
        after = server.metrics()
        for name in ('cached_tokens_total{tier="host"}', "prefix_cache_hits_total"):
            assert after[name] - before[name] == 20 * BLOCK
        assert after['cached_tokens_total{tier="device"}'] == 0

        request_id = again.headers["x-quipu-request-id"]
        (explained,) = server.get(f"/v1/cache/explain/{request_id}").json()["prompts"]
        assert explained["cached_tokens_by_tier"] == NONE | {"host": 20 * BLOCK}
        assert [tuple(block.values()) for block in explained["blocks"]] == [
            (0, 20 * BLOCK, "reused", "host"),
            (20 * BLOCK, len(LONG), "computed", None),
        ]
        eventually(lambda: server.get(f"/v1/usage/{request_id}").status_code == 200, "its record")
        record = server.get(f"/v1/usage/{request_id}").json()
        assert {tier: record[f"cached_{tier}_tokens"] for tier in NONE} == NONE | {"host": 20 * BLOCK}
        line = eventually(
            lambda: [line for line in server.events("prefix_cache.stats") if line["request_id"] == request_id],
            "the log line of its cached tokens",
        )[0]
        assert line["total_host_tokens"] == line["total_cached_tokens"] == 20 * BLOCK

        nodes = server.get("/v1/cache/tree?depth=9").json()["nodes"]
        tiers = {node["tier"] for node in nodes}
        assert tiers == {"device", "host"}, nodes
        for node in nodes:
            assert sum(node["cached_tokens_by_tier"].values()) == node["cached_tokens"]

        mirror = subscriber.mirror
        turns = iter(range(2000, 3000))
        subscriber.receive_while(
            lambda: mirror.prefix_of(LONG) < 20 * BLOCK or not mirror.lower["CPU"],
            lambda: server.complete([next(turns)] * (BLOCK + 1), max_tokens=1),
        )
        mirror.check(None)
        after = server.metrics()
        assert after['kv_tier_loaded_blocks_total{tier="host"}'] == 20
        assert (
            after['kv_tier_stored_blocks_total{tier="host"}'] > 20
            and after['kv_tier_blocks{state="used",tier="host"}'] > 20
        )
        assert after["usage_disputed_total"] == 0

        # the next engine has nothing on the host: prompts are computed, and counted as computed
        os.kill(server.engine_pid(), signal.SIGKILL)
        eventually(lambda: server.metrics()['kv_tier_blocks{state="used",tier="host"}'] == 0, "the tier is empty")
        server.wait_ready()
        again = server.complete(LONG, **DETAILS)
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == NONE
        assert server.metrics()["usage_disputed_total"] == 0
