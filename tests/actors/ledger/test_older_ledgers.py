"""A ledger that an older quipu wrote: read, checked and continued as if nothing had changed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import trio
from tests.actors.ledger.ledgers import SEGMENT, record_of, so_far_of
from tests.postgres import Postgres

from quipu.actors.ledger import entries
from quipu.actors.ledger.checking import verify
from quipu.actors.ledger.database import make_engine, migrate, sqlite_url
from quipu.actors.ledger.fields import flatten
from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.messages import UsageRecord


async def serve(folder: Path, name: str, **fields: Any) -> None:
    """One server's life, with one request."""
    with trio.fail_after(30):
        async with open_ledger(LedgerConfig(data_dir=folder, segment_bytes=SEGMENT, version="test")) as ledger:
            assert ledger.journal.admit(so_far_of(name))
            ledger.journal.close(record_of(name, **fields), partial(int))
            ledger.journal.flush()


def without_seed(record: UsageRecord) -> dict[str, Any]:
    """A record as quipu wrote it before it kept seeds."""
    return {name: value for name, value in flatten(record).items() if name != "seed"}


def make_it_older(url: str) -> None:
    """Bring a database back to what version 0001 made."""
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("alter table usage_records drop column seed"))
        connection.execute(sa.text("update alembic_version set version_num = '0001'"))
    engine.dispose()


async def test_records_without_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old lines and old rows keep their hashes; their seed is not known. New ones follow in the same chain."""
    with monkeypatch.context() as older:
        older.setattr(entries, "flatten", without_seed)
        await serve(tmp_path, "old")
    make_it_older(sqlite_url(tmp_path))
    await serve(tmp_path, "new", seed=-5)
    for url in (None, sqlite_url(tmp_path)):
        verdict = verify(data_dir=tmp_path if url is None else None, url=url)
        assert not verdict.bad and not verdict.torn and (verdict.num_records, verdict.num_servers) == (2, 2)
    with open_reader(data_dir=tmp_path) as reader:
        seeds = {found.record.request_id: found.record.seed for found in reader.records()}
    assert seeds == {"old": None, "new": -5}


async def test_a_seed_that_was_changed_shows(tmp_path: Path) -> None:
    """It is part of what is verified."""
    await serve(tmp_path, "one", seed=7)
    engine = make_engine(sqlite_url(tmp_path))
    with engine.begin() as connection:
        connection.execute(sa.text("update usage_records set seed = 8"))
    engine.dispose()
    (problem,) = verify(url=sqlite_url(tmp_path)).bad
    assert "seed is 8 in the database, and was written as 7" in problem


def test_upgrade_in_postgres(postgres: Postgres) -> None:
    """The column comes to a table that has rows, in PostgreSQL as in SQLite."""
    url = postgres.new_database()
    engine = make_engine(url)
    migrate(engine)
    engine.dispose()
    make_it_older(url)
    engine = make_engine(url)
    migrate(engine)
    with engine.connect() as connection:
        assert "seed" in {column["name"] for column in sa.inspect(connection).get_columns("usage_records")}
    engine.dispose()
