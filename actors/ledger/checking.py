"""Checks that the ledger is as it was written: `quipu ledger verify`, with the server down or running.

Walks the chain of each server that ever wrote, through the database and the write-ahead file as one: numbers have no
gap, each entry has the hash of the one before it, each text matches its own hash and its row's columns, and each
server's last entry is the one that the next server named. *Bad* is what was changed, lost or damaged. *Torn* and *open*
is what a kill leaves; the next start repairs it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final

import attrs
import sqlalchemy as sa

from .entries import NO_HASH, EntryKind, hash_of, parse_text
from .fields import with_defaults
from .folder import LedgerFolder
from .reading import LedgerReader, open_reader
from .schema import marks, records, sources
from .segment_files import Damage, DiskStorage, Position, scan

_PAGE: Final = 1000


@attrs.frozen
class ChainedEntry:
    """One entry of a chain, from the database or from the write-ahead file."""

    number: int
    hash: str
    text: str
    columns: dict[str, object] | None
    """The columns of a database row. None: it is from the write-ahead file."""

    @property
    def is_record(self) -> bool:
        """False for a start or stop, and for a second closing of a request."""
        return '"kind":"closed"' in self.text if self.columns is None else "request_id" in self.columns

    @property
    def name(self) -> str:
        request_id = self.columns and self.columns.get("request_id")
        if request_id is None and (entry := parse_text(self.text, self.hash)) and entry.kind is EntryKind.CLOSED:
            request_id = entry.request_id
        return f"entry {self.number}" + (f", request {request_id}" if request_id else "")


@attrs.define
class Verdict:
    num_records: int = 0
    num_servers: int = 0
    bad: list[str] = attrs.field(factory=list)
    """Each with its place. Only the first of each chain, since what follows it cannot be checked."""
    torn: list[str] = attrs.field(factory=list)
    num_open: int = 0
    is_in_use: bool = False
    """A server is running: what looks torn or open may be in progress."""


@attrs.define
class _WriteAheadFile:
    chains: dict[str, dict[int, ChainedEntry]] = attrs.field(factory=dict)
    open_ids: set[str] = attrs.field(factory=set)
    damages: list[tuple[Damage, bool]] = attrs.field(factory=list)
    """Each with whether it is at the very end."""


def verify(*, data_dir: Path | None = None, url: str | None = None) -> Verdict:
    """Check a data directory, a database, or both together. Raises LedgerError."""
    verdict = Verdict()
    with open_reader(data_dir=data_dir, url=url) as reader:
        file = _WriteAheadFile()
        if data_dir is not None:
            folder = LedgerFolder(data_dir)
            file, verdict.is_in_use = _read_file(folder), folder.is_in_use
        for damage, is_last in file.damages:
            place = f"segment {damage.start.segment}, byte {damage.start.offset}: {damage.num_bytes} bytes"
            if damage.is_tail and is_last:
                verdict.torn.append(f"{place} of an entry that was cut off")
            else:
                verdict.bad.append(f"{place} that are not an entry")
        verdict.num_open = len(file.open_ids)
        _verify_chains(reader, file, verdict)
    return verdict


def _verify_chains(reader: LedgerReader, file: _WriteAheadFile, verdict: Verdict) -> None:
    with reader.connection() as connection:
        stored = {} if connection is None else _servers(connection)
        with_retention = sa.select(sources.c.ledger).where(sources.c.retained_since.is_not(None))
        retained = set() if connection is None else set(connection.scalars(with_retention))
        ends: dict[str, ChainedEntry] = {}
        heads: dict[str, ChainedEntry] = {}
        for server in dict.fromkeys((*stored, *file.chains)):
            verdict.num_servers += 1
            rows = _links_of(connection, server) if connection is not None else iter(())
            may_begin_late = stored.get(server) in retained
            for link in _merged(rows, file.chains.get(server, {})):
                before = ends.get(server)
                problem = _problem(link, before, server, may_begin_late=may_begin_late)
                if problem is not None:
                    verdict.bad.append(f"server {server}, {link.name}: {problem}")
                    break
                heads.setdefault(server, link)
                ends[server] = link
                verdict.num_records += link.is_record
        if not verdict.bad:
            verdict.bad += _missing_ends(heads, ends, may_lack=bool(retained))


def _problem(link: ChainedEntry, before: ChainedEntry | None, server: str, *, may_begin_late: bool) -> str | None:
    if hash_of(link.text) != link.hash:
        return "its text does not match its hash"
    entry = parse_text(link.text, link.hash)
    if entry is None or entry.server != server or entry.number != link.number:
        return "its text is not this entry's"
    if before is None and not may_begin_late and (link.number != 0 or entry.previous != NO_HASH):
        return f"{link.number} entries before it are missing"
    if before is not None and link.number != before.number + 1:
        return f"{link.number - before.number - 1} entries before it are missing"
    if before is not None and entry.previous != before.hash:
        return "it does not follow the entry before it"
    if link.columns is not None and entry.kind is EntryKind.CLOSED and "request_id" in link.columns:
        for name, written in with_defaults(entry.values).items():
            if (now := link.columns[name]) != written:
                return f"{name} is {now!r} in the database, and was written as {written!r}"
    return None


def _missing_ends(heads: dict[str, ChainedEntry], ends: dict[str, ChainedEntry], *, may_lack: bool) -> Iterator[str]:
    """Yield each server whose last entries are missing, as the first entry of the next server shows."""
    for server, head in heads.items():
        entry = parse_text(head.text, head.hash)
        after = entry.values.get("after") if entry is not None and entry.kind is EntryKind.START else None
        if not after:
            continue
        end = ends.get(after["server"])
        if end is None:
            if not may_lack:
                yield f"server {after['server']}: all its entries are missing; server {server} came after it"
        # a database may know more than a file that lost its end in a power failure
        elif end.number < after["number"] or (end.number == after["number"] and end.hash != after["hash"]):
            yield f"server {after['server']}, {end.name}: {after['number'] - end.number} entries after it are missing"


def _merged(rows: Iterator[ChainedEntry], entries: dict[int, ChainedEntry]) -> Iterator[ChainedEntry]:
    """Merge rows and file entries by number. An entry in both places comes once, or twice if they differ."""
    last = None
    for link in heapq.merge(rows, (entries[number] for number in sorted(entries)), key=attrgetter("number")):
        if (link.number, link.hash) != last:
            yield link
        last = link.number, link.hash


def _read_file(folder: LedgerFolder) -> _WriteAheadFile:
    file = _WriteAheadFile()
    storage = DiskStorage(folder.path)
    damages: list[Damage] = []
    last_used = 0
    for number in storage.numbers():
        try:
            data = storage.read(number).rstrip(b"\0")
        except FileNotFoundError:
            continue  # loaded and deleted meanwhile
        last_used = number if data else last_used
        found = scan(data, Position(number, 0))
        damages += found.damages
        for entry in (located.entry for located in found.entries):
            if entry.kind is EntryKind.ADMITTED:
                file.open_ids.add(entry.request_id)
                continue
            if entry.kind is EntryKind.CLOSED:
                file.open_ids.discard(entry.request_id)
            assert entry.number is not None
            link = ChainedEntry(entry.number, entry.hash, entry.text, None)
            file.chains.setdefault(entry.server, {})[entry.number] = link
    file.damages = [(damage, damage.start.segment == last_used) for damage in damages]
    return file


def _servers(connection: sa.Connection) -> dict[str, str]:
    """Return each server's ledger, in the order of the servers' first entries."""
    both = sa.union_all(
        sa.select(records.c.server, records.c.ledger, records.c.position),
        sa.select(marks.c.server, marks.c.ledger, marks.c.position),
    ).subquery()
    first = sa.func.min(both.c.position)
    found = sa.select(both.c.server, both.c.ledger).group_by(both.c.server, both.c.ledger)
    return {row.server: row.ledger for row in connection.execute(found.order_by(both.c.ledger, first))}


def _links_of(connection: sa.Connection, server: str) -> Iterator[ChainedEntry]:
    """Yield a server's rows by number, read in pages."""
    at = -1
    while True:
        some = sa.select(records).where(records.c.server == server, records.c.number > at)
        rows = connection.execute(some.order_by(records.c.number).limit(_PAGE)).all()
        others = sa.select(marks).where(marks.c.server == server, marks.c.number > at)
        if len(rows) == _PAGE:
            others = others.where(marks.c.number < rows[-1].number)
        for row in sorted((*rows, *connection.execute(others)), key=lambda row: row.number):
            yield ChainedEntry(row.number, row.hash, row.entry, row._asdict())
        if len(rows) < _PAGE:
            return
        at = rows[-1].number
