"""Is the ledger as it was written? `quipu ledger verify`.

Walks the chain of each server that ever wrote, through database and write-ahead file as one: numbers without a gap,
each entry with the hash of the one before it, each text with its own hash, each row's columns as its text says, and
each server's last entry as the next server named it. Works on what lies there, with the server down or up.

What is *bad* was changed, lost or spoilt. What is *torn* or *open* is what a kill leaves, and the next start puts
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import sqlalchemy as sa

from .entries import NO_HASH, Entry, EntryKind, hash_of, parse_text
from .fields import DEFAULTS, FIELD_NAMES
from .folder import LedgerFolder
from .reading import LedgerReader, open_reader
from .schema import marks, records, sources
from .segment_files import Damage, DiskStorage, Position, scan

_PAGE: Final = 1000


@attrs.frozen
class Link:
    """One chained entry, wherever it stands."""

    number: int
    hash: str
    text: str
    columns: dict[str, object] | None
    """Of a row in the database: what its columns say."""

    @property
    def is_record(self) -> bool:
        """Not so the closing of a request that had its record already."""
        return '"kind":"closed"' in self.text if self.columns is None else "request_id" in self.columns

    @property
    def name(self) -> str:
        request_id = self.columns and self.columns.get("request_id")
        if request_id is None and (entry := parse_text(self.text, self.hash)) and entry.kind is EntryKind.CLOSED:
            request_id = entry.request_id
        return f"entry {self.number}" + (f", request {request_id}" if request_id else "")


@attrs.define
class Verdict:
    """What verify found."""

    num_records: int = 0
    num_servers: int = 0
    bad: list[str] = attrs.field(factory=list)
    """Each with its place; of one chain the first only, since what follows cannot be judged."""
    torn: list[str] = attrs.field(factory=list)
    num_open: int = 0
    """Requests that were admitted and are not closed."""
    is_in_use: bool = False
    """A server is writing: what looks torn or open may just be under way."""


@attrs.define
class _File:
    """What the write-ahead file holds."""

    chains: dict[str, dict[int, Link]] = attrs.field(factory=dict)
    open_ids: set[str] = attrs.field(factory=set)
    damages: list[tuple[Damage, bool]] = attrs.field(factory=list)
    """Each with whether it lies at the very end."""


def verify(*, data_dir: Path | None = None, url: str | None = None) -> Verdict:
    """Check a data directory, a database, or both together. Raises LedgerError."""
    verdict = Verdict()
    with open_reader(data_dir=data_dir, url=url) as reader:
        file = _File() if data_dir is None else _read_file(LedgerFolder(data_dir))
        if data_dir is not None:
            verdict.is_in_use = LedgerFolder(data_dir).is_in_use
        for damage, is_last in file.damages:
            place = f"segment {damage.start.segment}, byte {damage.start.offset}: {damage.num_bytes} bytes"
            if damage.is_tail and is_last:
                verdict.torn.append(f"{place} of an entry that was cut off")
            else:
                verdict.bad.append(f"{place} that are no entry")
        verdict.num_open = len(file.open_ids)
        _verify_chains(reader, file, verdict)
    return verdict


def _verify_chains(reader: LedgerReader, file: _File, verdict: Verdict) -> None:
    with reader.connection() as connection:
        stored = {} if connection is None else _servers(connection)
        retained = set() if connection is None else _ledgers_cut(connection)
        ends: dict[str, Link] = {}
        heads: dict[str, Link] = {}
        for server in dict.fromkeys((*stored, *file.chains)):
            verdict.num_servers += 1
            rows = _links_of(connection, server) if connection is not None else iter(())
            may_begin_late = stored.get(server) in retained
            problem = None
            for link in _joined(rows, file.chains.get(server, {})):
                before = ends.get(server)
                problem = _problem(link, before, server, may_begin_late=may_begin_late)
                if problem is not None:
                    verdict.bad.append(f"server {server}, {link.name}: {problem}")
                    break
                heads.setdefault(server, link)
                ends[server] = link
                verdict.num_records += link.is_record
        if not verdict.bad:
            verdict.bad += _cut_ends(heads, ends, may_lack=bool(retained))


def _problem(link: Link, before: Link | None, server: str, *, may_begin_late: bool) -> str | None:
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
        for name in FIELD_NAMES:
            now, written = link.columns[name], entry.values.get(name, DEFAULTS[name])
            if now != written:
                return f"{name} is {now!r} in the database, and was written as {written!r}"
    return None


def _cut_ends(heads: dict[str, Link], ends: dict[str, Link], *, may_lack: bool) -> Iterator[str]:
    """A server's first entry names the last one of the server before it."""
    for server, head in heads.items():
        entry = parse_text(head.text, head.hash)
        after = entry.values.get("after") if entry is not None and entry.kind is EntryKind.START else None
        if not after:
            continue
        end = ends.get(after["server"])
        if end is None:
            if not may_lack:
                yield f"server {after['server']}: all its entries are missing; server {server} came after it"
        # a database may know more than a file that has lost its end with the power
        elif end.number < after["number"] or (end.number == after["number"] and end.hash != after["hash"]):
            yield f"server {after['server']}, {end.name}: {after['number'] - end.number} entries behind it are missing"


# ---------------------------------------------------------------- both places as one


def _joined(rows: Iterator[Link], entries: dict[int, Link]) -> Iterator[Link]:
    """By number; where an entry stands in both places, the row first and then, if it differs, the other one."""
    left = dict(entries)
    for row in rows:
        for number in sorted(number for number in left if number < row.number):
            yield left.pop(number)
        twin = left.pop(row.number, None)
        yield row
        if twin is not None and twin.hash != row.hash:
            yield twin
    for number in sorted(left):
        yield left[number]


def _read_file(folder: LedgerFolder) -> _File:
    file = _File()
    storage = DiskStorage(folder.path)
    damages: list[Damage] = []
    last_used = 0
    for number in storage.numbers():
        try:
            data = storage.read(number).rstrip(b"\0")
        except FileNotFoundError:
            continue  # loaded meanwhile
        last_used = number if data else last_used
        found = scan(data, Position(number, 0))
        damages += found.damages
        for placed in found.entries:
            _note(file, placed.entry)
    file.damages = [(damage, damage.start.segment == last_used) for damage in damages]
    return file


def _note(file: _File, entry: Entry) -> None:
    if entry.kind is EntryKind.ADMITTED:
        file.open_ids.add(entry.request_id)
        return
    if entry.kind is EntryKind.CLOSED:
        file.open_ids.discard(entry.request_id)
    assert entry.number is not None
    file.chains.setdefault(entry.server, {})[entry.number] = Link(entry.number, entry.hash, entry.text, None)


def _servers(connection: sa.Connection) -> dict[str, str]:
    """Each server's ledger, in the order of their first entries."""
    both = sa.union_all(
        sa.select(records.c.server, records.c.ledger, records.c.position),
        sa.select(marks.c.server, marks.c.ledger, marks.c.position),
    ).subquery()
    first = sa.func.min(both.c.position)
    found = sa.select(both.c.server, both.c.ledger).group_by(both.c.server, both.c.ledger)
    return {row.server: row.ledger for row in connection.execute(found.order_by(both.c.ledger, first))}


def _ledgers_cut(connection: sa.Connection) -> set[str]:
    """Those whose old records the retention has deleted."""
    return set(connection.scalars(sa.select(sources.c.ledger).where(sources.c.retained_since.is_not(None))))


def _links_of(connection: sa.Connection, server: str) -> Iterator[Link]:
    """A server's rows by number, read in pages."""
    at = -1
    while True:
        some = sa.select(records).where(records.c.server == server, records.c.number > at)
        rows = connection.execute(some.order_by(records.c.number).limit(_PAGE)).all()
        others = sa.select(marks).where(marks.c.server == server, marks.c.number > at)
        if len(rows) == _PAGE:
            others = others.where(marks.c.number < rows[-1].number)
        links = [_link(row) for row in (*rows, *connection.execute(others))]
        yield from sorted(links, key=lambda link: link.number)
        if len(rows) < _PAGE:
            return
        at = rows[-1].number


def _link(row: sa.Row[tuple[object, ...]]) -> Link:
    columns = row._asdict()
    return Link(row.number, row.hash, row.entry, columns)
