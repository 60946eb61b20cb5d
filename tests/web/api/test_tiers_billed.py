"""Hits from every tier in the books: answers, counters, records, the ledger's sums, reports, costs and `reconcile`."""

from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.actors.ledger.reading import Query, open_reader
from quipu.actors.ledger.reconciling import parse_metrics, reconcile
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.messages.scheduler import Submit
from quipu.web.api.admin.cost_report import price_parts
from quipu.web.api.admin.prices import read_prices
from tests.scripted_engine import (
    Admit,
    Compute,
    Revise,
    ScriptedEntry,
    Token,
    scripted_runtime,
    settle_scripted,
    tokens,
)
from tests.traps.bills import bill_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples

NUM_REQUESTS, NUM_TOKENS = 24, 131
TIERS = ("device", "host", "disk", "remote")
NAMED = (*TIERS, "unattributed")
PRICES = {"device": 1, "host": 10, "disk": 100, "remote": 1000, "unattributed": 1}
"""What a million cached tokens cost, by tier."""
PRICE = """
[[prices]]
model = "demo"
currency = "EUR"
input = 100000
cached_input = 1
cached_input_host = 10
cached_input_disk = 100
cached_input_remote = 1000
output = 0
"""


def drawn(submit: Submit, draw: random.Random) -> list[list[ScriptedEntry]]:
    """Return the reports of a request that finds blocks in drawn tiers, some of which do not come."""
    blocks = draw.choices((*TIERS, "tape"), k=draw.randrange(9))
    found = {tier: 16 * number for tier, number in Counter(blocks).items()}
    lost = draw.choice([tier for tier in found if tier in ("host", "disk", "remote")] or [None])
    read = sum(found.values()) - (0 if lost is None else 16)
    failures: list[ScriptedEntry] = [] if lost is None else [Revise(lost, 16)]
    first: list[ScriptedEntry] = [Admit(read=read, tiers=found)]
    if draw.random() < 0.3:
        return [[*first, *failures], [Compute(read, NUM_TOKENS), Token()], *tokens(3)]
    return [first, failures, [Compute(read, NUM_TOKENS), Token()], *tokens(3)]


@pytest.mark.parametrize("seed", range(3))
async def test_books(seed: int, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Whatever tiers hits come from, each number is the same in every book, and each tier's tokens have its price."""
    draw, told = random.Random(seed), Counter[str]()
    price_file = tmp_path / "prices.toml"
    price_file.write_text(PRICE)
    folder = tmp_path / "data"
    async with (
        open_ledger(LedgerConfig(folder)) as ledger,
        scripted_runtime(lambda submit: drawn(submit, draw), journal=ledger.journal) as client,
    ):
        http = over_http(client)
        for number in range(NUM_REQUESTS):
            request = body(prompt_of(NUM_TOKENS, number), return_cached_tokens_details=True)
            if number % 2:
                _, chunks = await http.stream(COMPLETIONS, {**request, **STREAMED})
                usage: Any = chunks[-2]["usage"]
            else:
                usage = (await http.post(COMPLETIONS, request))[1]["usage"]
            details = usage["prompt_tokens_details"]
            assert sum(details["cached_tokens_by_tier"].values()) == details["cached_tokens"]
            told.update(details["cached_tokens_by_tier"])
        await settle_scripted(client)
        counters = samples(client)
        (account,) = reconcile(data_dir=folder, live=parse_metrics(client.runtime.metrics.render().decode()))
    assert min(told[tier] for tier in NAMED) > 0, "every tier was drawn"
    assert counters["usage_disputed_total"] == 0
    assert {tier: counters[f'cached_tokens_total{{tier="{tier}"}}'] for tier in NAMED} == told

    assert account.agrees
    lines = {line.name: (line.ledger, line.counter) for line in account.lines}
    assert {tier: lines[f'cached_tokens_total{{tier="{tier}"}}'] for tier in NAMED} == {
        tier: (number, number) for tier, number in told.items()
    }
    with open_reader(data_dir=folder) as reader:
        recorded = Counter[str]()
        for found in reader.records():
            recorded.update(found.record.cached_by_tier or {})
        prices = read_prices(price_file)
        parts = [(Query(), reader.sums(Query(), group_by=["model"]))]
        (line,) = price_parts(parts, [], prices)
    assert recorded == told
    assert {tier: getattr(line.sum, f"cached_{tier}_tokens") for tier in NAMED} == told
    num_computed = NUM_REQUESTS * NUM_TOKENS - told.total()
    cost = num_computed * 100_000 + sum(PRICES[tier] * number for tier, number in told.items())
    assert line.amounts == {"EUR": Decimal(cost) / 1_000_000}
    bill = await bill_of(folder)
    assert (bill.requests, bill.prompt, bill.cached) == (NUM_REQUESTS, NUM_REQUESTS * NUM_TOKENS, told.total())
