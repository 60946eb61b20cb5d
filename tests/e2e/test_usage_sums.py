"""A real server and a real ledger: after a random load, counters, records and responses have the same sums.

`tests/web/api/test_sums.py` does the same at length, in one event loop.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import httpx
import pytest

from quipu.actors.ledger.reading import open_reader
from quipu.actors.messages.outcomes import Outcome
from tests.e2e.ledger_command import ledger
from tests.e2e.servers import PATIENCE_S, Server, serving
from tests.web.surfaces import SURFACES, Surface

NUM_REQUESTS = 120
POISON = 777
STEM = "A quipu is a ledger of cords, and each of its knots is a number that somebody has counted. "


@attrs.frozen
class Received:
    surface: Surface
    request_id: str | None
    """None: the client disconnected before the response started."""
    data: bytes


def ask(server: Server, seed: int) -> Received:
    rng = random.Random(seed)
    surface = rng.choice(SURFACES)
    body: dict[str, Any] = surface.body(
        STEM * rng.randint(0, 4) + f"{rng.randrange(9)}?", max_tokens=rng.randint(1, 120)
    )
    leaves = rng.random() < 0.15
    if leaves:
        body |= surface.body(STEM, max_tokens=500)
    elif surface.api == "completions" and rng.random() < 0.12:
        body["prompt"] = [*rng.choices(range(1000, 3000), k=20), POISON]
    elif rng.random() < 0.05:
        body |= surface.body(STEM * 200)
    try:
        timeout = httpx.Timeout(PATIENCE_S, read=0.3 if leaves else PATIENCE_S)
        with httpx.stream("POST", server.url + surface.path, json=body, timeout=timeout) as response:
            request_id = response.headers["X-Quipu-Request-Id"]
            if leaves and surface.streamed:
                return Received(surface, request_id, next(response.iter_raw()))
            return Received(surface, request_id, response.read())
    except httpx.ReadTimeout:
        return Received(surface, None, b"")


def test_sums(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The sums agree once no account is open, and `quipu ledger reconcile` agrees after the stop."""
    folder = tmp_path_factory.mktemp("sums")
    flags = ("--executor", "fake", "--fake-poison-token-id", str(POISON), "--num-blocks", "40", "--max-num-seqs", "16")
    with serving(folder, *flags, "--fake-step-seconds", "0.003") as server:
        with ThreadPoolExecutor(16) as pool:
            responses = list(pool.map(lambda seed: ask(server, seed), range(NUM_REQUESTS)))
        counters = server.wait_at_rest()
        with open_reader(data_dir=folder / "data") as reader:
            records = {found.record.request_id: found.record for found in reader.records()}
    assert {record.outcome for record in records.values()} == set(Outcome)
    sums: dict[str, list[Any]] = {
        "prompt_tokens_total": [record.prompt_tokens for record in records.values()],
        "prefix_cache_queries_total": [record.prompt_tokens for record in records.values()],
        "prefix_cache_hits_total": [record.cached_tokens for record in records.values()],
        'cached_tokens_total{tier="device"}': [record.cached_tokens for record in records.values()],
        "generation_tokens_total": [record.completion_tokens for record in records.values()],
        "moved_tokens_total": [record.moved_tokens for record in records.values()],
        "recomputed_tokens_total": [record.recomputed_tokens for record in records.values()],
        **{
            f'requests_total{{outcome="{outcome}"}}': [record.outcome is outcome for record in records.values()]
            for outcome in Outcome
        },
    }
    for name, column in sums.items():
        assert counters[name] == sum(number or 0 for number in column), name
    assert counters["usage_disputed_total"] == counters["open_accounts"] == 0
    assert counters["prefix_cache_hits_total"] > 0 and counters["num_preemptions_total"] > 0
    num_compared = 0
    for received in responses:
        for numbers in received.surface.read(received.data).finals:
            record = records[received.request_id or ""]
            usage = (numbers.prompt, numbers.cached, numbers.completion)
            assert usage == (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
            num_compared += 1
    assert num_compared > NUM_REQUESTS / 3
    assert ledger(folder, "reconcile").returncode == 0
