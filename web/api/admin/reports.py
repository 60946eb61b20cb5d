"""Usage reports as values, which are sent to a process that reads the ledger.

A route checks its parameters and makes a `Report`; a `UsageSource` (`usage_source.py`) has it made in that process
(`report_worker.py`), from the first query to the bytes of the body.

What must always hold: reports import no web framework and no event loop, which the process would load first; a report's
bytes depend on nothing but the report and the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import orjson

from quipu.actors.ledger.exporting import values_of
from quipu.actors.ledger.fields import restore
from quipu.actors.ledger.reading import GroupColumn, LedgerRecord, Query, Sum
from quipu.actors.ledger.receipts import Pages


class Ledger(Pages, Protocol):
    """What reports read: a `LedgerReader`."""

    def sums(
        self,
        query: Query | None = None,
        *,
        group_by: Sequence[GroupColumn] = (),
        bucket_s: int | None = None,
        collapse_retries: bool = False,
    ) -> list[Sum]: ...


class Report(Protocol):
    """A report that a client has asked for. It is pickled."""

    def make(self, ledger: Ledger) -> bytes:
        """Return the body. Raises ReportRefused, and what reading the ledger raises."""
        ...


class ReportRefused(Exception):
    """The report cannot be made as it was asked for: a 400. The message is for the client."""

    def __init__(self, message: str, param: str | None, code: str) -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param
        self.code = code


@attrs.frozen
class FirstRecord:
    """The first record that matches, for `record_in`."""

    query: Query

    def make(self, ledger: Ledger) -> bytes:
        found = next(ledger.records(self.query), None)
        return orjson.dumps(None if found is None else values_of(found))


@attrs.frozen
class RecordedRequests:
    """Which of these requests have a record that counts in reports, for `ids_in`."""

    request_ids: tuple[str, ...]

    def make(self, ledger: Ledger) -> bytes:
        records = ledger.records(Query(request_ids=self.request_ids))
        return orjson.dumps([found.record.request_id for found in records if found.record.fault is None])


def ids_in(body: bytes) -> frozenset[str]:
    """Return the ids of a `RecordedRequests`."""
    return frozenset(orjson.loads(body))


def record_in(body: bytes) -> LedgerRecord | None:
    """Return the record of a `FirstRecord`."""
    values = orjson.loads(body)
    if values is None:
        return None
    place = {name: values[name] for name in ("server", "number", "hash", "recovered")}
    return LedgerRecord(restore(values), **place)
