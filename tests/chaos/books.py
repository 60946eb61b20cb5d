"""The usage ledger after a chaotic run: one record for each request, none disputed, none that contradicts a client."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import attrs

from quipu.actors.ledger.reading import open_reader
from tests.chaos.load import Tally
from tests.e2e.ledger_command import ledger


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
    problems: list[str]


def check_books(folder: Path, tally: Tally, url: str | None) -> Books:
    """Read the ledger of a server that has ended, in `folder`/data and the database `url`."""
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
        engine_deaths=max((record.num_engine_deaths for record in records), default=0),
        problems=problems + wrong[:20] + [f"{each} was answered and has no record" for each in list(lost)[:20]],
    )
