"""The usage ledger after a chaotic run: one record for each request, none disputed, none that contradicts a client."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from quipu.actors.ledger.reading import open_reader
from quipu.actors.messages.counts import Known
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from tests.chaos.load import Tally
from tests.e2e.ledger_command import ledger

COMPARED = (
    *("prompt_tokens_total", "prefix_cache_hits_total", "generation_tokens_total"),
    *("recomputed_tokens_total", "moved_tokens_total"),
    *(f'requests_total{{outcome="{outcome}"}}' for outcome in (Outcome.FINISHED, Outcome.FAILED, Outcome.CANCELLED)),
)
"""Counters of each engine. Rejected requests are left out: not all of them have a record."""


@attrs.frozen
class Books:
    records: int
    records_lost: int
    """Requests that were answered and have no record."""
    records_doubled: int
    records_wrong: int
    """Records that contradict what their clients were told."""
    accounts_disputed: int
    engine_deaths: int
    """Most that one request has survived."""
    by_engine: dict[str, int]
    """Records by the engine that admitted their request first; empty: none did."""
    moved_to: dict[str, int]
    """Moved tokens by the engine that they came to."""
    problems: list[str]


def check_books(folder: Path, tally: Tally, url: str | None, by_engine: Mapping[str, Mapping[str, float]]) -> Books:
    """Read the ledger of a server that has ended, in `folder`/data and the database `url`.

    `by_engine`: its last counters, by the label `engine`; empty if there never were two.
    """
    problems = []
    with open_reader(data_dir=folder / "data", url=url) as reader:
        records = [found.record for found in reader.records()]
    times = Counter(record.request_id for record in records)
    by_id = {record.request_id: record for record in records}
    lost = tally.finished_ids.keys() - by_id.keys()
    wrong = [
        f"{request_id}: {tokens} completion tokens were answered, the ledger has {by_id[request_id]}"
        for request_id, tokens in tally.finished_ids.items()
        if request_id in by_id
        and (by_id[request_id].outcome.value != "finished" or tokens not in (None, by_id[request_id].completion_tokens))
    ]
    environment = {} if url is None else {"QUIPU_LEDGER_URL": url}
    verified = ledger(folder, "verify", **environment)
    if verified.returncode or "open:" in verified.stdout:
        problems.append(f"quipu ledger verify: {verified.stdout}{verified.stderr}")
    reconciled = ledger(folder, "reconcile", "--json", **environment)
    if reconciled.returncode or not all(account["agrees"] for account in json.loads(reconciled.stdout)):
        problems.append(f"quipu ledger reconcile: {reconciled.stdout[:2000]}{reconciled.stderr}")
    return Books(
        records=len(records),
        records_lost=len(lost),
        records_doubled=sum(count > 1 for count in times.values()),
        records_wrong=len(wrong),
        accounts_disputed=sum(record.disputed for record in records),
        by_engine=dict(Counter(_label(record) for record in records)),
        moved_to=dict(sum((Counter(_moved_to(record)) for record in records), Counter())),
        engine_deaths=max((record.num_engine_deaths for record in records), default=0),
        problems=[
            *problems,
            *engine_faults(records, by_engine),
            *wrong[:20],
            *(f"{each} was answered and has no record" for each in list(lost)[:20]),
        ],
    )


def _label(record: UsageRecord) -> str:
    return "" if record.engine is None else str(record.engine)


def _moved_to(record: UsageRecord) -> dict[str, int]:
    return {str(engine_id): num_tokens for engine_id, num_tokens in record.moved_by_engine.items()}


def engine_faults(records: Sequence[UsageRecord], by_engine: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return what contradicts the counters of each engine, or what no record of several engines may say."""
    if not by_engine:
        return []
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    faults = []
    for record in records:
        found = sums[_label(record)]
        found["prompt_tokens_total"] += record.prompt_tokens or 0
        found["prefix_cache_hits_total"] += record.cached.n if isinstance(record.cached, Known) else 0
        found["generation_tokens_total"] += record.completion_tokens
        found["recomputed_tokens_total"] += record.recomputed_tokens
        for engine, num_tokens in _moved_to(record).items():  # one request may move more than once
            sums[engine]["moved_tokens_total"] += num_tokens
        if sum(record.moved_by_engine.values()) != record.moved_tokens:
            faults.append(f"what was moved to each engine does not add up: {record}")
        found[f'requests_total{{outcome="{record.outcome.value}"}}'] += 1
        was_admitted = record.prompt_tokens is not None
        expected = record.router_estimate or 0
        if was_admitted and (None in (record.engine, record.incarnation) or expected > (record.prompt_tokens or 0)):
            faults.append(f"a record of no engine, or with a wrong estimate: {record}")
    for engine in sorted({*sums, *by_engine}):
        counters = by_engine.get(engine, {})
        faults += [
            f"engine {engine!r}: {name} is {counters.get(name)}, the records have {sums[engine][name]}"
            for name in COMPARED
            if sums[engine][name] != counters.get(name, 0.0)
        ]
    return faults[:20]
