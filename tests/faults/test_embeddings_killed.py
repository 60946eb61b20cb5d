"""Actors that die at every message of embeddings and scores: vectors, records and counters are the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from tests.crash_scenario import POINTS, CrashingAccountant, CrashPlan, without_times
from tests.journals import KeptJournal
from tests.killed_text_actors import KillPlan, killing
from tests.runtimes import Client, small_runtime
from tests.text_scenario import without_ids
from tests.traps.wire import over_http, samples, settle

WORDS = ["cord", "knot", "rain", "terrace", "star", "river", "maize", "stone"]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": " ".join(WORDS) * 6}),
    ("/v1/embeddings", {"input": [" ".join(WORDS) * 6, *WORDS], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": [[7, 8, 9] * 30, [5]], "dimensions": 3}),
    ("/v1/score", {"text_1": "cord", "text_2": WORDS}),
    ("/v2/rerank", {"query": "knot", "documents": WORDS, "top_n": 3}),
]
NUM_REQUESTS = 12
DETOKENIZER = ("before", "prompt scored", "before completed", "completed", "handled")
TOKENIZER = ("before", "sampled", "second submit", "handled")
UNDISTURBED: list[Any] = []


async def run(**options: Any) -> Any:
    """Send requests, one after the other and at once; return everything that can be observed."""
    answers: dict[int, Any] = {}
    journal = KeptJournal()

    async def ask(client: Client, number: int) -> None:
        path, body = BODIES[number % len(BODIES)]
        exchange, answer = await over_http(client).post(path, {"model": "demo", **body})
        answers[number] = exchange.status, without_ids(answer)

    with structlog.testing.capture_logs():  # each death is logged
        async with small_runtime(task="embed", journal=journal, num_blocks=200, **options) as client:
            for number in range(len(BODIES)):
                await ask(client, number)
            async with trio.open_nursery() as nursery:
                for number in range(len(BODIES), NUM_REQUESTS):
                    nursery.start_soon(ask, client, number)
            await settle(client)
            counters = samples(client)
    kept = {"prompt_tokens_total", "prefix_cache_hits_total", "generation_tokens_total", "usage_disputed_total"}
    records = sorted((str(without_times(record)) for record in journal.closed), key=str)
    return answers, records, {name: value for name, value in counters.items() if name in kept}


def undisturbed() -> Any:
    if not UNDISTURBED:
        UNDISTURBED.append(trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0)))
    return UNDISTURBED[0]


def run_killed(**options: Any) -> Any:
    return trio.run(partial(run, **options), clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("actor", "point"),
    [*(("detokenizer", point) for point in DETOKENIZER), *(("tokenizer", point) for point in TOKENIZER)],
)
def test_text_actors(actor: str, point: str) -> None:
    """Tokenizer and detokenizer are killed at one point of every message, and nobody notices."""
    plan = KillPlan(point)
    assert run_killed(**killing(actor, plan)) == undisturbed()
    assert plan.num_kills > 0 and not plan.held_slots


@pytest.mark.parametrize("point", POINTS)
def test_accountant(point: str) -> None:
    """The accountant is killed at one point of every message, and nobody notices."""
    plan = CrashPlan(point)
    assert run_killed(make_accountant=partial(CrashingAccountant, plan=plan)) == undisturbed()
    assert plan.num_crashes > 0
