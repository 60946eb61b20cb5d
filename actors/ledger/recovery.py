"""Recovery at start-up: reads what earlier servers left in the write-ahead file, before anything new is written.

A torn end (a write that a kill cut off) is truncated; damage elsewhere is left for `quipu ledger verify` to report.
Requests that were admitted and never closed are returned, for the new server to close. Nothing else is changed, so
after a crash during recovery the next start has the same work to do, or less.
"""

from __future__ import annotations

import attrs
import structlog

from ..messages.usage_record import UsageRecord
from .database import LedgerError
from .entries import Entry, EntryKind
from .retries import RetryIndex
from .segment_files import Position, Storage, scan

log = structlog.get_logger("quipu.ledger")


@attrs.frozen
class Recovered:
    """What earlier servers left to do."""

    open_records: tuple[UsageRecord, ...]
    """Of requests that were never closed, as they were at their admission, oldest first."""
    after: dict[str, object] | None
    """Server, number and hash of the last chained entry, which the next `start` entry names."""
    next_segment: int
    empty_segments: tuple[int, ...]
    """To be deleted once there is a newer segment."""


def recover(storage: Storage, retries: RetryIndex) -> Recovered:
    """Read everything, truncate a torn end, and add admitted requests to `retries`. Raises OSError and LedgerError."""
    open_records: dict[str, UsageRecord] = {}
    after: dict[str, object] | None = None
    empty: list[int] = []
    numbers = storage.numbers()
    for number in numbers:
        data = storage.read(number)
        found = scan(data, Position(number, 0))
        for located in found.entries:
            entry = located.entry
            if entry.kind in (EntryKind.ADMITTED, EntryKind.CLOSED):
                record = _record_of(entry)
                retries.admit(record)
                open_records.pop(record.request_id, None)
                if entry.kind is EntryKind.ADMITTED:
                    open_records[record.request_id] = record
            if entry.kind is not EntryKind.ADMITTED:
                after = {"server": entry.server, "number": entry.number, "hash": entry.hash}
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
    return Recovered(tuple(open_records.values()), after, max(numbers, default=0) + 1, tuple(empty))


def _record_of(entry: Entry) -> UsageRecord:
    try:
        return entry.record()
    except (KeyError, ValueError) as error:
        raise LedgerError(
            f"the write-ahead file has a record that this version of quipu cannot read ({error}); a newer one wrote it"
        ) from None
