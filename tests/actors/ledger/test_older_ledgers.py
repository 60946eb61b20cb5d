"""A ledger written by an older version can be read, verified and continued."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import sqlalchemy as sa
import trio

from quipu.actors.ledger import entries
from quipu.actors.ledger.checking import verify
from quipu.actors.ledger.database import make_engine, migrate, sqlite_url
from quipu.actors.ledger.durable_journal import DurableJournal
from quipu.actors.ledger.fields import flatten
from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.messages.usage_record import UsageRecord
from tests.actors.ledger.ledgers import SEGMENT, record_of, so_far_of
from tests.postgres import Postgres


@attrs.frozen
class OldSchema:
    """An older version of the schema, and the fields added after it."""

    version: str
    later_fields: tuple[str, ...]

    def flatten(self, record: UsageRecord) -> dict[str, Any]:
        """Flatten a record as that version did."""
        return {name: value for name, value in flatten(record).items() if name not in self.later_fields}

    def restore(self, url: str) -> None:
        """Downgrade a database to that version."""
        engine = make_engine(url)
        with engine.begin() as connection:
            for name in self.later_fields:
                connection.execute(sa.text(f"alter table usage_records drop column {name}"))
            if self.version < "0007":
                connection.execute(sa.text("alter table ledger_sources drop column retention_clock"))
            connection.execute(sa.text(f"update alembic_version set version_num = '{self.version}'"))
        engine.dispose()


BY_ENGINE = ("moved_by_engine",)
BATCHED = ("batch_id", *BY_ENGINE)
KIND = ("kind", *BATCHED)
ADAPTED = ("adapter", "parent", *KIND)
DRAFTS = ("draft_tokens", "accepted_draft_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
DRAFTED = (*DRAFTS, *ADAPTED)
MOVED = ("moved_tokens", "decode_engine", "decode_incarnation", *DRAFTED)
PASSED_ON = ("completion_kind", "upstream_usage", *MOVED)
ROUTED = ("engine", "router_estimate_tokens", *PASSED_ON)
OLDER = [
    OldSchema("0001", ("seed", "fault", "engine_deaths", *ROUTED)),
    OldSchema("0002", ("fault", "engine_deaths", *ROUTED)),
    OldSchema("0003", ("engine_deaths", *ROUTED)),
    OldSchema("0004", ROUTED),
    OldSchema("0005", PASSED_ON),
    OldSchema("0006", MOVED),
    OldSchema("0007", MOVED),
    OldSchema("0008", DRAFTED),
    OldSchema("0009", ADAPTED),
    OldSchema("0010", KIND),
    OldSchema("0011", BATCHED),
    OldSchema("0012", BY_ENGINE),
]
of_each_version = pytest.mark.parametrize("older", OLDER, ids=[older.version for older in OLDER])


async def serve(folder: Path, name: str, **fields: Any) -> None:
    """Run one server with one request."""
    with trio.fail_after(60):
        async with open_ledger(LedgerConfig(data_dir=folder, segment_bytes=SEGMENT, version="test")) as ledger:
            assert ledger.journal.admit(so_far_of(name))
            ledger.journal.close(record_of(name, **fields), partial(int))
            ledger.journal.flush()


@of_each_version
async def test_records_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: OldSchema) -> None:
    """Old lines and rows keep their hashes; fields they lack are unknown. New ones continue the same chain."""
    with monkeypatch.context() as then:
        then.setattr(entries, "flatten", older.flatten)
        await serve(tmp_path, "old", seed=3, outcome=Outcome.FAILED)
    older.restore(sqlite_url(tmp_path))
    await serve(tmp_path, "new", seed=-5, outcome=Outcome.FAILED, fault=Fault.STEP_FAILED)
    for url in (None, sqlite_url(tmp_path)):
        verdict = verify(data_dir=tmp_path if url is None else None, url=url)
        assert not verdict.bad and not verdict.torn and (verdict.num_records, verdict.num_servers) == (2, 2)
    with open_reader(data_dir=tmp_path) as reader:
        fields_read = {found.record.request_id: (found.record.seed, found.record.fault) for found in reader.records()}
        (sums,) = reader.sums()
    assert fields_read == {"old": (None if "seed" in older.later_fields else 3, None), "new": (-5, Fault.STEP_FAILED)}
    assert (sums.num_requests, sums.num_faulted, sums.completion_tokens) == (2, 1, 10)


@pytest.mark.parametrize("is_loaded", [False, True], ids=["file", "database"])
async def test_recovered_record_of_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    """A record that an older version recovered counts as failed by the server, without tokens."""
    older = OLDER[1]
    with monkeypatch.context() as then:
        then.setattr(entries, "flatten", older.flatten)
        if not is_loaded:
            then.setattr("quipu.actors.ledger.loader.load", lambda *_: 0)
        async with open_ledger(LedgerConfig(data_dir=tmp_path, segment_bytes=SEGMENT)) as ledger:
            recover(ledger.journal, record_of("old", outcome=Outcome.FAILED))
    with open_reader(data_dir=tmp_path) as reader:
        (found,) = reader.records()
        (sums,) = reader.sums()
    assert found.recovered and found.record.fault is Fault.RECOVERED
    assert (sums.num_requests, sums.num_faulted, sums.prompt_tokens) == (1, 1, 0)
    assert not verify(data_dir=tmp_path).bad


def recover(journal: DurableJournal, record: UsageRecord) -> None:
    journal.recover(record)
    journal.flush()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed = 8", "seed is 8 in the database, and was written as 7"),
        ("fault = 'engine_died'", "fault is 'engine_died' in the database, and was written as None"),
    ],
)
async def test_changed_new_field_is_detected(tmp_path: Path, change: str, message: str) -> None:
    """Fields added later are verified like the rest."""
    await serve(tmp_path, "one", seed=7)
    engine = make_engine(sqlite_url(tmp_path))
    with engine.begin() as connection:
        connection.execute(sa.text(f"update usage_records set {change}"))
    engine.dispose()
    (problem,) = verify(url=sqlite_url(tmp_path)).bad
    assert message in problem


@of_each_version
def test_upgrade_in_postgres(postgres: Postgres, older: OldSchema) -> None:
    """Columns are added to a table with rows, in PostgreSQL as in SQLite."""
    url = postgres.new_database()
    engine = make_engine(url)
    migrate(engine)
    engine.dispose()
    older.restore(url)
    engine = make_engine(url)
    migrate(engine)
    with engine.connect() as connection:
        names = {column["name"] for column in sa.inspect(connection).get_columns("usage_records")}
    assert {"seed", "fault", *MOVED} <= names
    engine.dispose()
