"""The entries of the write-ahead file: the format of a line, and the hash chain between them. Pure.

    SHA-256 of the text, in hex   space   text: one JSON object with its keys in order   newline

A line that was cut off or changed does not match its hash. There are four kinds: `start` and `stop` of a server,
`admitted` (a request that will have a record) and `closed` (the record). All but `admitted` form the chain of their
server's incarnation: numbered from 0, each with the hash of the one before it. Fields that have their default
(`fields.DEFAULTS`) are left out: half of a record, and nearly all of a rejected one.

What must always hold: a line is at most MAX_LINE_BYTES long, and a `closed` line at most GROWTH_BYTES longer than its
`admitted` line, which is the room reserved for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import attrs
import orjson

from ..messages.usage_record import UsageRecord
from .fields import DEFAULTS, Value, flatten, restore

MAX_LINE_BYTES: Final = 32 * 1024
GROWTH_BYTES: Final = 6144
HASH_CHARS: Final = 64
_ALWAYS: Final = frozenset({"request_id", "outcome"})
NO_HASH: Final = "0" * HASH_CHARS
"""Stands for the hash before a chain's first entry."""


class EntryKind(StrEnum):
    START = "start"
    ADMITTED = "admitted"
    CLOSED = "closed"
    STOP = "stop"


@attrs.frozen
class Entry:
    kind: EntryKind
    server: str
    """The server's incarnation: a random id for each start."""
    hash: str
    text: str
    at: float
    number: int | None = None
    """Its place in the chain. None for `admitted`, which is not in one."""
    previous: str | None = None
    """Hash of the entry before it in the chain."""
    values: Mapping[str, Any] = attrs.field(factory=dict)
    """For `admitted` and `closed`, the flat record without defaults; for `start` and `stop`, their values."""
    recovered: bool = False
    """Whether recovery wrote this closing because the request's server died."""

    @property
    def request_id(self) -> str:
        return str(self.values["request_id"])

    def record(self) -> UsageRecord:
        """Restore the record. Raises KeyError and ValueError for values that are not a record."""
        return restore(self.values)


@attrs.frozen
class Line:
    data: bytes
    hash: str


def admitted_line(server: str, at: float, record: UsageRecord) -> Line:
    return _line({"kind": EntryKind.ADMITTED, "server": server, "at": at, "record": _shortened(record)})


class Chain:
    """Makes the chained entries of one server incarnation, in order."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.num_entries = 0
        self.last_hash = NO_HASH

    def start(self, at: float, values: Mapping[str, object]) -> Line:
        return self._link({"kind": EntryKind.START, "at": at, "start": values})

    def close(self, at: float, record: UsageRecord, *, recovered: bool = False) -> Line:
        return self._link({"kind": EntryKind.CLOSED, "at": at, "record": _shortened(record), "recovered": recovered})

    def stop(self, at: float, values: Mapping[str, object]) -> Line:
        return self._link({"kind": EntryKind.STOP, "at": at, "stop": values})

    def _link(self, entry: dict[str, object]) -> Line:
        line = _line(entry | {"server": self.server, "number": self.num_entries, "previous": self.last_hash})
        self.num_entries += 1
        self.last_hash = line.hash
        return line


def parse_line(line: bytes) -> Entry | None:
    """Parse a line without its newline. Returns None if it is incomplete or not an entry."""
    if len(line) <= HASH_CHARS + 1 or line[HASH_CHARS : HASH_CHARS + 1] != b" ":
        return None
    text = line[HASH_CHARS + 1 :]
    digest = hashlib.sha256(text).hexdigest()
    if digest.encode() != line[:HASH_CHARS]:
        return None
    return parse_text(text.decode("utf-8", "replace"), digest)


def parse_text(text: str, digest: str) -> Entry | None:
    """Parse an entry's text. Returns None if it is not one. The caller has checked the hash."""
    try:
        fields = orjson.loads(text)
        kind = EntryKind(fields["kind"])
        return Entry(
            kind=kind,
            server=fields["server"],
            hash=digest,
            text=text,
            at=fields["at"],
            number=fields.get("number"),
            previous=fields.get("previous"),
            values=fields["record" if kind in (EntryKind.ADMITTED, EntryKind.CLOSED) else kind.value],
            recovered=fields.get("recovered", False),
        )
    except (orjson.JSONDecodeError, KeyError, ValueError, TypeError):
        return None


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shortened(record: UsageRecord) -> dict[str, Value]:
    """Return the fields of a record that are not the default."""
    values = flatten(record)
    return {name: value for name, value in values.items() if name in _ALWAYS or value != DEFAULTS[name]}


def _line(fields: dict[str, object]) -> Line:
    text = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(text).hexdigest()
    return Line(b"%s %s\n" % (digest.encode(), text), digest)
