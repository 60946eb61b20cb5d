"""The entries of the write-ahead file: what a line holds, and how one is tied to the one before it.

    SHA-256 of the text, in hex   space   text: one JSON object with its keys in order   newline

A line that was cut off, or changed, does not match its hash. Four kinds: `start` and `stop` of a server, `admitted`
(a request that will have a record), `closed` (the record). All but `admitted` form the chain of their server's
incarnation: numbered from 0, each with the hash of the one before it. `admitted` is kept only until its closing is.

A record's line leaves out what has its default (`fields.DEFAULTS`), which is half of it, and nearly all for a refusal.

Pure. `durable_journal.py` makes lines, `segment_files.py` finds them again.

What must always hold: a line is never longer than MAX_LINE_BYTES, and a closing never longer than the admission it
belongs to plus GROWTH_BYTES: the room that is reserved for it.
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
GROWTH_BYTES: Final = 4096
HASH_CHARS: Final = 64
_ALWAYS: Final = frozenset({"request_id", "outcome"})
NO_HASH: Final = "0" * HASH_CHARS
"""Before the first entry of a chain."""


class EntryKind(StrEnum):
    START = "start"
    ADMITTED = "admitted"
    CLOSED = "closed"
    STOP = "stop"


@attrs.frozen
class Entry:
    """One entry, as it was read."""

    kind: EntryKind
    server: str
    """The server's incarnation: a random id for each start."""
    hash: str
    text: str
    at: float
    """Unix seconds, when it was written."""
    number: int | None = None
    """Its place in the chain; None for `admitted`, which is in none."""
    previous: str | None = None
    """Hash of the entry before it in the chain."""
    values: Mapping[str, Any] = attrs.field(factory=dict)
    """Of `admitted` and `closed`: the flat record, defaults left out. Of `start` and `stop`: what they say."""
    recovered: bool = False
    """A closing that recovery wrote, since its server did not."""

    @property
    def request_id(self) -> str:
        return str(self.values["request_id"])

    def record(self) -> UsageRecord:
        """Raises KeyError and ValueError where the values are no record's."""
        return restore(self.values)


@attrs.frozen
class Line:
    """One entry, as it is written."""

    data: bytes
    hash: str


def admitted_line(server: str, at: float, record: UsageRecord) -> Line:
    return _line({"kind": EntryKind.ADMITTED, "server": server, "at": at, "record": _shortened(record)})


class Chain:
    """The chained entries of one incarnation, in the order in which they are made."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.num_entries = 0
        self.last_hash = NO_HASH

    def start(self, at: float, says: Mapping[str, object]) -> Line:
        return self._tie({"kind": EntryKind.START, "at": at, "start": says})

    def close(self, at: float, record: UsageRecord, *, recovered: bool = False) -> Line:
        return self._tie({"kind": EntryKind.CLOSED, "at": at, "record": _shortened(record), "recovered": recovered})

    def stop(self, at: float, says: Mapping[str, object]) -> Line:
        return self._tie({"kind": EntryKind.STOP, "at": at, "stop": says})

    def _tie(self, entry: dict[str, object]) -> Line:
        line = _line(entry | {"server": self.server, "number": self.num_entries, "previous": self.last_hash})
        self.num_entries += 1
        self.last_hash = line.hash
        return line


def parse_line(line: bytes) -> Entry | None:
    """The entry of a line without its newline; None where the line is not whole, or not an entry."""
    if len(line) <= HASH_CHARS + 1 or line[HASH_CHARS : HASH_CHARS + 1] != b" ":
        return None
    text = line[HASH_CHARS + 1 :]
    digest = hashlib.sha256(text).hexdigest()
    if digest.encode() != line[:HASH_CHARS]:
        return None
    return parse_text(text.decode("utf-8", "replace"), digest)


def parse_text(text: str, digest: str) -> Entry | None:
    """The entry whose text this is; None where it is none. That the hash is right is the caller's to check."""
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
    """What has to be written of a record; `restore` knows the rest."""
    values = flatten(record)
    return {name: value for name, value in values.items() if name in _ALWAYS or value != DEFAULTS[name]}


def _line(fields: dict[str, object]) -> Line:
    text = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(text).hexdigest()
    return Line(b"%s %s\n" % (digest.encode(), text), digest)
