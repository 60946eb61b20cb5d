"""What an earlier life left in the write-ahead file, read once at a start, before anything new is written.

A torn end (a write that a kill has cut off) is cut away; damage elsewhere is left for `quipu ledger verify` to name.
Requests that were admitted and never closed are returned, to be closed by the life that begins. Nothing else is
changed, so a crash in the middle of it leaves the same work, or less of it, for the next start.
"""

from __future__ import annotations

import attrs
import structlog

from ..messages.outcomes import Fault, Outcome
from ..messages.usage_record import UsageRecord
from .database import LedgerError
from .entries import Entry, EntryKind
from .retries import RetryIndex
from .segment_files import Position, Storage, scan

log = structlog.get_logger("quipu.ledger")


@attrs.frozen
class Left:
    """What there is to do about earlier lives."""

    open_records: tuple[UsageRecord, ...]
    """As they were at their admission, oldest first."""
    after: dict[str, object] | None
    """Server, number and hash of the last chained entry: the next life names it in its start."""
    next_segment: int
    empty_segments: tuple[int, ...]
    """To be deleted once there is a newer one."""


def look_back(storage: Storage, retries: RetryIndex) -> Left:
    """Read everything, cut what is torn, and tell `retries` who was admitted. Raises OSError and LedgerError."""
    open_records: dict[str, UsageRecord] = {}
    after: dict[str, object] | None = None
    empty: list[int] = []
    numbers = storage.numbers()
    for number in numbers:
        data = storage.read(number)
        found = scan(data, Position(number, 0))
        for placed in found.entries:
            entry = placed.entry
            if entry.kind is EntryKind.ADMITTED:
                record = _record_of(entry)
                open_records.pop(record.request_id, None)
                open_records[record.request_id] = record
                retries.admit(record)
                continue
            after = {"server": entry.server, "number": entry.number, "hash": entry.hash}
            if entry.kind is EntryKind.CLOSED:
                record = _record_of(entry)
                open_records.pop(record.request_id, None)
                retries.admit(record)
        used = len(data.rstrip(b"\0"))
        for damage in found.damages:
            what = {"segment": number, "offset": damage.start.offset, "num_bytes": damage.num_bytes}
            if damage.is_tail:
                log.warning("ledger.torn", **what, help="a write was cut off; the torn end is cut away")
                used = min(used, damage.start.offset)
            else:
                log.error("ledger.damaged", **what, help="run `quipu ledger verify`")
        if used < len(data):
            storage.truncate(number, used)
        if used == 0:
            empty.append(number)
    return Left(tuple(open_records.values()), after, max(numbers, default=0) + 1, tuple(empty))


def closing_of(record: UsageRecord, now: float) -> UsageRecord:
    """The record of a request whose server has died: what was known at its admission, and that it failed."""
    return attrs.evolve(record, outcome=Outcome.FAILED, finish_reason=None, closed_at=now, fault=Fault.RECOVERED)


def _record_of(entry: Entry) -> UsageRecord:
    try:
        return entry.record()
    except (KeyError, ValueError) as error:
        raise LedgerError(
            f"the write-ahead file holds a record that this quipu cannot read ({error}): a newer one wrote it"
        ) from None
