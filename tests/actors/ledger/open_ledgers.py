"""Ledgers that are opened, written and read by tests, in folders of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import sqlalchemy as sa
import trio

from quipu.actors.ledger.database import make_engine, sqlite_url
from quipu.actors.ledger.fields import FIELD_NAMES, flatten
from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.schema import records
from quipu.actors.ledger.service import Ledger, LedgerConfig, open_ledger
from quipu.actors.messages.usage_record import UsageRecord
from tests.actors.ledger.ledgers import SEGMENT, record_of, so_far_of
from tests.processes import PATIENCE_S


def config_of(folder: Path, **changes: object) -> LedgerConfig:
    return LedgerConfig(**{"data_dir": folder, "segment_bytes": SEGMENT, "version": "test", **changes})


@asynccontextmanager
async def opened(folder: Path, **changes: object) -> AsyncIterator[Ledger]:
    with trio.fail_after(60):
        async with open_ledger(config_of(folder, **changes)) as ledger:
            yield ledger


async def write(ledger: Ledger, *names: str, closes: bool = True, **fields: object) -> None:
    for name in names:
        assert ledger.journal.admit(so_far_of(name, **fields))
    ledger.journal.flush()
    if closes:
        for name in names:
            ledger.journal.close(record_of(name, **fields), partial(int))
        ledger.journal.flush()


async def loaded(ledger: Ledger) -> None:
    with trio.fail_after(PATIENCE_S):
        while ledger.loader.position is None or ledger.loader.position < ledger.journal.durable:
            await trio.sleep(0.005)


def ids_in(folder: Path) -> list[str]:
    with open_reader(data_dir=folder) as reader:
        return [found.record.request_id for found in reader.records()]


def rows_in(folder: Path, table: str = "usage_records") -> int:
    engine = make_engine(sqlite_url(folder), reads_only=True)
    with engine.connect() as connection:
        number = connection.scalar(sa.text(f"select count(*) from {table}"))
    engine.dispose()
    return int(number or 0)


def insert_records(url: str, kept: Iterable[UsageRecord]) -> None:
    """Insert records into a database that is at HEAD, without a write-ahead file."""
    rows = [_row(number, record) for number, record in enumerate(kept)]
    engine = make_engine(url)
    with engine.begin() as connection:
        if rows:
            connection.execute(sa.insert(records), rows)
    engine.dispose()


def _row(number: int, record: UsageRecord) -> dict[str, object]:
    values = flatten(record)
    chain = {"server": "srv-1", "number": number, "hash": "0" * 64, "previous": "0" * 64, "ledger": "l", "position": 0}
    chain["entry"] = "e" * 400
    return {**{name: values[name] for name in FIELD_NAMES}, "recovered": False, **chain}


class sa_engine:
    """Open an engine on a data directory's database, disposed of afterwards."""

    def __init__(self, folder: Path) -> None:
        self._engine = make_engine(sqlite_url(folder))

    def __enter__(self) -> sa.Engine:
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()
