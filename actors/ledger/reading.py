"""Reads the ledger for every report, next to a running server or with the server down, even after a crash.

    with open_reader(data_dir=Path("data")) as reader:          # or url="postgresql+psycopg://..."; or both
        one = reader.get("req-...")                              # a LedgerRecord, or None
        for found in reader.records(Query(since=t0, until=t1, tenants=("acme",))): ...
        sums = reader.sums(Query(since=t0, until=t1), group_by=("model", "key_id"), bucket_s=3600)

All of it blocks, and large sums keep the interpreter lock: a server opens a reader for each report in a process of its
own (`web/api/admin/report_worker.py`). With a data directory, records that are not loaded yet are read from the
write-ahead file, so a record can be found as soon as its client has its response. Times select by `closed_at`, so a
bucket in the past does not change, except with `collapse_retries`: a request that did not finish moves out of its
bucket once a retry has finished (`retry_groups.py`).

What must always hold: each request is returned once, even while records are being loaded; nothing is changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import sqlalchemy as sa

from ..messages.outcomes import Fault
from ..messages.usage_record import UsageRecord
from .database import KeptEngines, LedgerError, NoLedgerYet, check_version, loaded_position, reason
from .entries import Entry, EntryKind
from .fields import restore
from .folder import LedgerFolder
from .queries import GroupColumn, Query, Sum, SumBuilder, select_sums
from .retry_groups import Member, counted, is_counted, member_of, select_members
from .schema import marks, records
from .segment_files import BEGINNING, DiskStorage, Position, scan

__all__ = ["GroupColumn", "KeptEngines", "LedgerError", "LedgerReader", "LedgerRecord", "Query", "Sum", "open_reader"]

_PAGE = 1000


@attrs.frozen
class LedgerRecord:
    """One record and its place in the chain."""

    record: UsageRecord
    server: str
    number: int
    hash: str
    recovered: bool
    """Whether its server died, and the next one closed it with what was known at its admission."""


@contextmanager
def open_reader(
    *, data_dir: Path | None = None, url: str | None = None, engines: KeptEngines | None = None
) -> Iterator[LedgerReader]:
    """Open a reader of a data directory's ledger, a database, or both together. Raises LedgerError."""
    engines = engines or KeptEngines()
    folder = None if data_dir is None else LedgerFolder(data_dir)
    if folder is not None:
        if url is None and folder.about() is None and not folder.path.is_dir():
            raise LedgerError(f"there is no ledger in {data_dir}: name a server's folder with --data-dir")
        url = folder.url_for_reading(url)
    elif url is None:
        raise LedgerError("one of --data-dir and --ledger-url is required")
    taken = engine = None if url is None else engines.take(url)
    try:
        if engine is not None:
            try:
                check_version(engine)
            except sa.exc.SQLAlchemyError as error:
                raise LedgerError(f"cannot read the ledger's database: {reason(error)}") from None
            except NoLedgerYet:
                if folder is None:
                    raise
                engine = None  # a server has started but loaded nothing yet
        yield LedgerReader(engine, folder)
    finally:
        if taken is not None and url is not None:
            engines.give_back(url, taken)


class LedgerReader:
    def __init__(self, engine: sa.Engine | None, folder: LedgerFolder | None) -> None:
        self._engine = engine
        self._folder = folder

    def get(self, request_id: str) -> LedgerRecord | None:
        """Return the record of a request, by the server's own id."""
        return next(self.records(Query(request_ids=(request_id,))), None)

    def records(self, query: Query | None = None, *, newest_first: bool = False) -> Iterator[LedgerRecord]:
        """Yield records by `closed_at`, then request id. Read in pages, so the whole ledger is never in memory."""
        query = query or Query()
        view = self._look()

        def key(found: LedgerRecord) -> tuple[float, str]:
            return found.record.closed_at, found.record.request_id

        waiting = [found for found in view.unloaded if query.matches(found.record)]
        waiting.sort(key=key, reverse=newest_first)
        yield from heapq.merge(waiting, self._loaded(query, view, newest_first), key=key, reverse=newest_first)

    def sums(
        self,
        query: Query | None = None,
        *,
        group_by: Sequence[GroupColumn] = (),
        bucket_s: int | None = None,
        collapse_retries: bool = False,
    ) -> list[Sum]:
        """Return sums over groups and time buckets (aligned to the epoch, UTC), oldest first.

        Empty ones are absent; without groups and buckets there is one sum. `collapse_retries`: see `retry_groups.py`.
        """
        query = query or Query()
        view = self._look()
        builder = SumBuilder(tuple(group_by), bucket_s)
        groups = self._groups(view) if collapse_retries else None
        for found in view.unloaded:
            if query.matches(found.record) and (groups is None or groups.counts(found.record)):
                builder.add_record(found.record)
        if self._engine is not None:
            wanted = [*query.conditions(), *view.conditions]
            if groups is not None:
                wanted.append(groups.condition())
            with self._engine.connect() as connection:
                statement = select_sums(tuple(group_by), bucket_s, self._engine.dialect.name).where(*wanted)
                for row in connection.execute(statement):
                    builder.add_row(row._asdict())
        return builder.sums()

    def _groups(self, view: _View) -> _Groups:
        """Decide which records count, for retry groups with records that are not loaded yet."""
        unloaded = [member_of(found.record) for found in view.unloaded if found.record.idempotency_digest is not None]
        roots = list({member.root for member in unloaded})
        loaded: list[Member] = []
        if self._engine is not None:
            with self._engine.connect() as connection:
                for at in range(0, len(roots), _PAGE):
                    members = select_members(roots[at : at + _PAGE]).where(*view.conditions)
                    loaded += [
                        Member(row.request_id, row.retry_of, row.grade, row.closed_at)
                        for row in connection.execute(members)
                    ]
        counting = counted([*loaded, *unloaded])
        return _Groups(counting, tuple(member.request_id for member in loaded))

    @property
    def data_dir(self) -> Path | None:
        return None if self._folder is None else self._folder.data_dir

    def hashes(self, server: str, first: int, end: int) -> dict[int, str]:
        """Return the hashes of a server's chained entries with numbers from `first` to before `end`, by number."""
        about = None if self._folder is None else self._folder.about()
        found: dict[int, str] = {}
        with self.connection() as connection:
            if self._folder is not None and about is not None:
                loaded = BEGINNING if connection is None else loaded_position(connection, about.ledger)
                for entry in entries_after(self._folder, loaded):
                    if entry.server == server and entry.number is not None and first <= entry.number < end:
                        found[entry.number] = entry.hash
            if connection is not None:
                connection.rollback()  # and see what was loaded meanwhile
                for table in (records, marks):
                    there = sa.and_(table.c.server == server, table.c.number >= first, table.c.number < end)
                    rows = connection.execute(sa.select(table.c.number, table.c.hash).where(there))
                    found |= {row.number: row.hash for row in rows}
        return found

    @contextmanager
    def connection(self) -> Iterator[sa.Connection | None]:
        """Open a connection, for other checks. None: there is no database yet."""
        if self._engine is None:
            yield None
            return
        with self._engine.connect() as connection:
            yield connection

    def _look(self) -> _View:
        """Look up where the database ends, then read what follows: in this order, since loading may continue."""
        about = None if self._folder is None else self._folder.about()
        if self._folder is None or about is None:
            return _View((), ())
        storage, is_whole = DiskStorage(self._folder.path), False
        while not is_whole:
            loaded, there = self._position(about.ledger), storage.numbers()
            found: dict[str, LedgerRecord] = {}
            for entry in entries_after(self._folder, loaded):
                if entry.kind is EntryKind.CLOSED:
                    found.setdefault(entry.request_id, located(entry.record(), entry))
            # a segment that is gone was loaded before, or else amid this
            needed = {loaded.segment, *(number for number in there if number > loaded.segment)}
            is_whole = needed <= set(storage.numbers()) or self._position(about.ledger) == loaded
        is_loaded = sa.or_(records.c.ledger != about.ledger, records.c.position <= loaded.packed)
        if self._engine is not None:
            request_ids = list(found)
            with self._engine.connect() as connection:
                for at in range(0, len(request_ids), _PAGE):
                    some = sa.select(records.c.request_id).where(records.c.request_id.in_(request_ids[at : at + _PAGE]))
                    for row in connection.execute(some.where(is_loaded)):
                        del found[row.request_id]
        return _View((is_loaded,), tuple(found.values()))

    def _position(self, ledger: str) -> Position:
        with self.connection() as connection:
            return BEGINNING if connection is None else loaded_position(connection, ledger)

    def _loaded(self, query: Query, view: _View, newest_first: bool) -> Iterator[LedgerRecord]:
        if self._engine is None:
            return
        where = [*query.conditions(), *view.conditions]
        columns = (records.c.closed_at, records.c.request_id)
        order = [column.desc() if newest_first else column.asc() for column in columns]
        last: sa.Row[tuple[object, ...]] | None = None
        while True:
            page = sa.select(records).where(*where).order_by(*order).limit(_PAGE)
            if last is not None:
                place = sa.tuple_(*columns)
                here = sa.tuple_(sa.literal(last.closed_at), sa.literal(last.request_id))
                page = page.where(place < here if newest_first else place > here)
            with self._engine.connect() as connection:
                rows = connection.execute(page).all()
            for row in rows:
                yield located(restore(row._asdict()), row)
            if len(rows) < _PAGE:
                return
            last = rows[-1]


@attrs.frozen
class _Groups:
    """Which records count, of retry groups with records that are not loaded yet."""

    counting: set[str]
    loaded: tuple[str, ...]
    """Members of these groups that are in the database."""

    def counts(self, record: UsageRecord) -> bool:
        if record.idempotency_digest is None:
            return record.retry_of is None
        return record.request_id in self.counting

    def condition(self) -> sa.ColumnElement[bool]:
        """Whether a row of the database counts: by SQL alone, or by this decision for its group."""
        if not self.loaded:
            return is_counted()
        request_id = records.c.request_id
        counting = [name for name in self.loaded if name in self.counting]
        return sa.or_(sa.and_(is_counted(), request_id.not_in(self.loaded)), request_id.in_(counting))


@attrs.frozen
class _View:
    """A consistent view: the database up to a position, and the records after it from the file."""

    conditions: tuple[sa.ColumnElement[bool], ...]
    """Exclude rows loaded since the view was made: `unloaded` has them."""
    unloaded: tuple[LedgerRecord, ...]


def entries_after(folder: LedgerFolder, start: Position) -> Iterator[Entry]:
    """Yield the entries of the write-ahead file from `start` on, oldest first."""
    storage = DiskStorage(folder.path)
    for number in storage.numbers():
        if number < start.segment:
            continue
        offset = start.offset if number == start.segment else 0
        try:
            data = storage.read(number, offset)
        except FileNotFoundError:
            continue  # loaded and deleted meanwhile
        for located in scan(data, Position(number, offset)).entries:
            yield located.entry


def located(record: UsageRecord, at: Entry | sa.Row[tuple[object, ...]]) -> LedgerRecord:
    """Return a record and its place, with the fault that an older version did not set when it recovered it."""
    if at.recovered and record.fault is None:
        record = attrs.evolve(record, fault=Fault.RECOVERED)
    return LedgerRecord(record, at.server, at.number or 0, at.hash, at.recovered)
