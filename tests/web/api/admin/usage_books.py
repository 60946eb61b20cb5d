"""Sources for the tests of usage reports: records in memory behind the real interface, and populated databases."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import attrs
import trio

from quipu.actors.ledger.database import SQLITE_NAME, make_engine, migrate, sqlite_url
from quipu.actors.ledger.folder import FOLDER
from quipu.actors.ledger.queries import SumBuilder
from quipu.actors.ledger.reading import GroupColumn, KeptEngines, LedgerRecord, Query, Sum
from quipu.actors.ledger.retry_groups import counted, member_of
from quipu.actors.ledger.schema import records as table
from quipu.actors.messages.usage_record import UsageRecord
from quipu.web.api.admin.organization_usage import install_organization_usage
from quipu.web.api.admin.report_worker import Answer, Where, make
from quipu.web.api.admin.reports import Report, ReportRefused
from quipu.web.api.admin.usage_record import install_usage_record
from quipu.web.api.admin.usage_source import UsageSource
from quipu.web.app import make_app
from quipu.web.auth.keys import KeyStore
from quipu.web.request.errors import invalid
from tests.actors.ledger.ledgers import record_of
from tests.actors.ledger.open_ledgers import insert_records
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

OPENAI = "/v1/organization/usage/completions"
EMBEDDINGS = "/v1/organization/usage/embeddings"
ANTHROPIC = "/v1/organizations/usage_report/messages"
DAY = 86_400
MIDNIGHT = 1_748_736_000
"""2025-06-01T00:00:00Z."""
NOW = MIDNIGHT + 10 * DAY + 3600 * 12
"""Noon of the eleventh day."""


@attrs.define
class Book:
    """A ledger in memory, read like a `LedgerReader`."""

    kept: list[UsageRecord]
    seen_queries: list[Query]
    data_dir: Path | None = None
    """Where the key is that signs receipts."""

    def sums(
        self,
        query: Query | None = None,
        *,
        group_by: Sequence[GroupColumn] = (),
        bucket_s: int | None = None,
        collapse_retries: bool = False,
    ) -> list[Sum]:
        query = self._note(query)
        builder = SumBuilder(tuple(group_by), bucket_s)
        counting = counted(map(member_of, self.kept))
        for record in self.kept:
            if query.matches(record) and (not collapse_retries or record.request_id in counting):
                builder.add_record(record)
        return builder.sums()

    def records(self, query: Query | None = None, *, newest_first: bool = False) -> Iterator[LedgerRecord]:
        query = self._note(query)
        found = [record for record in self.kept if query.matches(record)]
        for number, record in enumerate(reversed(found) if newest_first else found):
            yield LedgerRecord(record, "srv-1", number, "hash", recovered=False)

    def hashes(self, server: str, first: int, end: int) -> dict[int, str]:
        return {}

    def _note(self, query: Query | None) -> Query:
        query = query or Query()
        self.seen_queries.append(query)
        return query


@attrs.define
class BookSource:
    """A source whose ledger is in memory. If `error` is set, every report raises it."""

    records: list[UsageRecord] = attrs.field(factory=list)
    error: Exception | None = None
    seen_queries: list[Query] = attrs.field(factory=list)
    data_dir: Path | None = None

    async def report(self, report: Report, party: Hashable = None) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        sent: Report = pickle.loads(pickle.dumps(report))
        try:
            return [sent.make(Book(self.records, self.seen_queries, self.data_dir))]
        except ReportRefused as refused:
            raise invalid(refused.message, refused.param, refused.code) from None


@attrs.define
class FolderSource:
    """A source that reads the ledger of a data directory here and now, where a server does it in a process."""

    data_dir: Path
    engines: KeptEngines = attrs.field(factory=KeptEngines)

    async def report(self, report: Report, party: Hashable = None) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        answer, data = make(report, Where(self.data_dir, None), self.engines)
        assert answer is Answer.MADE, data
        return [data]


def record_at(seconds: float, name: str | None = None, **changes: Any) -> UsageRecord:
    """Make the record of a request that closed `seconds` after MIDNIGHT: 100 prompt, 48 cached, 48 written, 10 output
    tokens.
    """
    name = name or f"r{seconds}-{sorted(changes)}"
    return record_of(name, **{"closed_at": MIDNIGHT + seconds, **changes})


def client_of(source: UsageSource, keys: KeyStore | None = None, now: float = NOW) -> Client:
    """Return a client of an app whose reports take `now` as the current time."""
    app = make_app(FakeDesk(), None, keys)
    install_organization_usage(app, source, lambda: now)
    install_usage_record(app, source)
    return Client(app)


async def get_report(client: Client, path: str, parameters: object = (), **headers: str) -> Any:
    """Return the response of a report that must succeed. `parameters` is a mapping or a list of pairs."""
    exchange, answer = await client.get(f"{path}?{urlencode(parameters, doseq=True)}", headers)
    assert exchange.status == 200, answer
    return answer


async def get_error(client: Client, path: str, parameters: object = ()) -> Any:
    """Return the error of a report that must be refused."""
    exchange, answer = await client.get(f"{path}?{urlencode(parameters, doseq=True)}")
    assert exchange.status == 400, answer
    return answer["error"]


def make_database(data_dir: Path) -> None:
    """Make an empty database in a data directory."""
    (data_dir / FOLDER).mkdir(parents=True)
    engine = make_engine(sqlite_url(data_dir))
    migrate(engine)
    engine.dispose()


def copy_database(template: Path, data_dir: Path, kept: Iterable[UsageRecord]) -> Path:
    """Make a data directory whose database contains these records."""
    shutil.copytree(template, data_dir)
    assert (data_dir / SQLITE_NAME).exists()
    insert_records(sqlite_url(data_dir), kept)
    return data_dir


def drop_records_table(data_dir: Path) -> None:
    """Drop the table of records: the database still opens and reports its version."""
    engine = make_engine(sqlite_url(data_dir))
    with engine.begin() as connection:
        table.drop(connection)
    engine.dispose()


def multiply(data_dir: Path, times: int) -> None:
    """Copy each record `times` times, under new ids."""
    engine = make_engine(sqlite_url(data_dir))
    names = ", ".join(column.name for column in table.c)  # migrations append columns that the schema declares elsewhere
    own = {"request_id": "request_id || '-' || {0}", "server": "server || '-' || {0}"}
    with engine.begin() as connection:
        for unused in ("chain", "digest"):  # building the indexes takes half of the time
            connection.exec_driver_sql(f"DROP INDEX usage_records_{unused}")
        connection.exec_driver_sql("CREATE TEMP TABLE first AS SELECT * FROM usage_records")
        for time in range(1, times):
            columns = ", ".join(own.get(column.name, column.name).format(time) for column in table.c)
            connection.exec_driver_sql(f"INSERT INTO usage_records ({names}) SELECT {columns} FROM first")
    engine.dispose()
