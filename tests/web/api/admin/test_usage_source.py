"""The ledger as the source of reports: the numbers, errors, and that a report over many records is cheap enough."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from quipu.actors.ledger import database
from quipu.actors.ledger.database import SQLITE_NAME, sqlite_url
from quipu.actors.ledger.reading import KeptEngines, open_reader
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.messages.counts import UNKNOWN, Estimate, Known
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.kernels.step_types import SequenceKind
from quipu.web.api.admin.usage_source import open_usage
from tests.web.api.admin.usage_books import (
    ANTHROPIC,
    DAY,
    EMBEDDINGS,
    MIDNIGHT,
    NOW,
    OPENAI,
    BookSource,
    FolderSource,
    client_of,
    copy_database,
    drop_records_table,
    get_report,
    make_database,
    multiply,
    record_at,
)
from tests.web.asgi_client import Client

PATIENCE_S = 100.0
"""How long a report may take to be made by a process, which yields to everything else on the machine."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with an empty database."""
    data_dir = tmp_path_factory.mktemp("ledger") / "data"
    make_database(data_dir)
    return data_dir


def random_records(num: int, seed: int) -> Iterator[UsageRecord]:
    """Return records over ten days, with every outcome and kind of count, some of them on a boundary."""
    draw = random.Random(seed)
    for number in range(num):
        moment = draw.choice([draw.uniform(0, 10 * DAY), draw.randrange(10 * 24) * 3600, draw.randrange(10) * DAY])
        retry_of = None if number < 9 else draw.choice([None, None, "another", "req-7", "req-8"])
        prompt, cached = draw.randrange(1, 5000), draw.choice([Known(0), Known(16), Estimate(32), UNKNOWN])
        yield record_at(
            moment,
            f"req-{number}",
            tenant=draw.choice(["acme", "b", "c"]),
            key_id=draw.choice(["k1", "k2", None]),
            model=draw.choice(["demo", "big"]),
            outcome=draw.choice(list(Outcome)),
            prompt=Known(prompt),
            cached=cached,
            cached_by_tier={"device": 16} if cached == Known(16) else None,
            completion_tokens=draw.randrange(100),
            retry_of=retry_of,
            idempotency_digest="d" * 64 if retry_of else draw.choice([None, "d" * 64]),
            fault=draw.choice([None, None, *Fault]),
            kind=draw.choice(list(SequenceKind)),
            batch_id=draw.choice([None, "batch_1"]),
        )


@contextmanager
def statements() -> Iterator[list[str]]:
    """Record the statements that read usage records, on any database, until the block ends."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM usage_records" in statement:
            seen.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


async def test_database_agrees_with_memory(template: Path, tmp_path: Path) -> None:
    """Reports from a database equal those from records in memory: groups, filters, boundaries, pages."""
    kept = list(random_records(2000, 7))
    in_memory = client_of(BookSource(kept))
    in_database = client_of(FolderSource(copy_database(template, tmp_path / "data", kept)))
    since, rfc3339 = {"start_time": MIDNIGHT}, {"starting_at": "2025-06-01T07:00:00+07:00", "bucket_width": "1h"}
    for path, parameters in (
        (OPENAI, {**since, "limit": 31}),
        (OPENAI, {"start_time": MIDNIGHT + 5000, "end_time": MIDNIGHT + 9 * DAY + 1, "group_by": "project_id"}),
        (OPENAI, {**since, "bucket_width": "1h", "limit": 168, "group_by": ["model", "api_key_id"]}),
        (OPENAI, {**since, "bucket_width": "1m", "limit": 1440, "project_ids": ["b", "c"], "models": "big"}),
        (OPENAI, {**since, "retries": "collapse", "group_by": ["project_id", "model"]}),
        (OPENAI, {**since, "batch": "true", "group_by": ["batch", "model"]}),
        (OPENAI, {**since, "batch": "false", "group_by": ["model"]}),
        (EMBEDDINGS, {**since, "group_by": ["model", "project_id"]}),
        (ANTHROPIC, {**rfc3339, "group_by[]": ["workspace_id", "model"]}),
        (ANTHROPIC, {**rfc3339, "group_by[]": ["service_tier"]}),
        (ANTHROPIC, {**rfc3339, "service_tiers[]": ["batch"], "group_by[]": ["service_tier", "model"]}),
    ):
        from_database = await get_report(in_database, path, parameters)
        assert from_database == await get_report(in_memory, path, parameters)
        assert sum(len(bucket["results"]) for bucket in from_database["data"]) > 5
    one = (await in_database.get("/v1/usage/req-77"))[1]
    for name, value in (await in_memory.get("/v1/usage/req-77"))[1].items():
        assert name in ("number", "hash") or one[name] == value


async def test_a_hundred_thousand_records(template: Path, tmp_path: Path) -> None:
    """A report over all records is one statement that the database aggregates; it takes about a
    second of processor time, which does not depend on the load of the machine."""
    data_dir = copy_database(template, tmp_path / "data", random_records(5000, 3))
    multiply(data_dir, 20)
    client = client_of(FolderSource(data_dir))
    for path, parameters in (
        (OPENAI, {"start_time": MIDNIGHT, "limit": 31, "group_by": ["model", "api_key_id", "project_id"]}),
        (ANTHROPIC, {"starting_at": "2025-06-01T00:00:00Z", "bucket_width": "1h", "limit": 168, "group_by[]": "model"}),
    ):
        with statements() as seen:
            began = time.process_time()
            answer = await get_report(client, path, parameters)
            took_s = time.process_time() - began
        num_results = sum(len(bucket["results"]) for bucket in answer["data"])
        print(f"{path}: {num_results} results of 100,000 records in {took_s * 1000:.0f} ms")
        assert num_results > 100 and len(seen) == 1 and "sum(" in seen[0] and "GROUP BY" in seen[0]
        assert took_s < 10.0


async def test_records_not_yet_loaded(tmp_path: Path) -> None:
    """A record is reported as soon as it is written, before it is in a database, and once afterwards."""
    data_dir = tmp_path / "data"

    async def num(client: Client) -> int:
        (bucket,) = (await get_report(client, OPENAI, {"start_time": MIDNIGHT, "end_time": MIDNIGHT + DAY}))["data"]
        return sum(result["num_model_requests"] for result in bucket["results"])

    async with open_usage(data_dir, read_s=PATIENCE_S) as usage, open_ledger(LedgerConfig(data_dir)) as ledger:
        client = client_of(usage, now=NOW)
        record = record_at(60, "req-1")
        assert ledger.journal.admit(record)
        ledger.journal.flush()
        assert await num(client) == 0
        ledger.journal.close(record, lambda: None)
        ledger.journal.flush()
        assert await num(client) == 1
        assert (await client.get("/v1/usage/req-1"))[1]["completion_tokens"] == 10
    assert (data_dir / SQLITE_NAME).exists()
    assert await num(client_of(FolderSource(data_dir), now=NOW)) == 1, "loaded by now"


async def test_no_ledger(tmp_path: Path) -> None:
    """A 503; its reason is in the log, and the response shows no server paths. Afterwards reports work again."""
    async with open_usage(tmp_path / "gone", read_s=PATIENCE_S) as usage:
        client = client_of(usage)
        with capture_logs() as lines:
            exchange, answer = await client.get(f"{OPENAI}?start_time=0")
        assert (exchange.status, answer["error"]["code"]) == (503, "ledger_unavailable")
        assert str(tmp_path) not in str(answer)
        assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["usage.ledger_away"]
        make_database(tmp_path / "gone")
        assert (await client.get(f"{OPENAI}?start_time=0"))[0].status == 200


async def test_broken_database(template: Path, tmp_path: Path) -> None:
    """A database that breaks before or during a report gives a 503."""
    data_dir = copy_database(template, tmp_path / "data", [])
    async with open_usage(data_dir, read_s=PATIENCE_S) as usage:
        client = client_of(usage)
        for breaks in (
            lambda: drop_records_table(data_dir),
            lambda: (data_dir / SQLITE_NAME).write_bytes(b"this is no database" * 500),
        ):
            breaks()
            for path in (f"{OPENAI}?start_time={MIDNIGHT}", "/v1/usage/req-1"):
                exchange, answer = await client.get(path)
                assert (exchange.status, answer["error"]["code"]) == (503, "ledger_unavailable")


async def test_engines_are_used_again(template: Path, tmp_path: Path) -> None:
    """The next report compiles nothing that an earlier one has compiled, and sees what was written since."""
    folder = copy_database(template, tmp_path / "data", [record_at(1, "r1")])
    kept = KeptEngines()
    with open_reader(data_dir=folder, engines=kept) as first, open_reader(data_dir=folder, engines=kept) as second:
        assert [one.sums()[0].num_requests for one in (first, second)] == [1, 1]
    engine = sa.create_engine(sqlite_url(folder))
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM usage_records")
    engine.dispose()
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "make_engine", lambda *args, **kwargs: made.append(args))
        with open_reader(data_dir=folder, engines=kept) as again:
            assert again.sums()[0].num_requests == 0
    assert not made
