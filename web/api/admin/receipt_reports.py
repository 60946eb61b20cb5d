"""The receipt of a record, and the keys that check receipts, as reports: made in the process that reads the ledger.

What must always hold: no web framework is imported, which the process would load first.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import orjson

from quipu.actors.ledger.reading import Query
from quipu.actors.ledger.receipt_keys import existing_keys, key_set, signing_key
from quipu.actors.ledger.receipts import make_receipt

from .reports import Ledger, ReportRefused
from .shown_record import shown_record


@attrs.frozen
class ReceiptReport:
    """The receipt of the first record of a query; empty without one."""

    query: Query

    def make(self, ledger: Ledger) -> bytes:
        found = next(ledger.records(self.query), None)
        if found is None:
            return b""
        key = signing_key(_key_folder(ledger))
        return orjson.dumps(make_receipt(ledger, found, shown_record(found, for_admin=False), key))


@attrs.frozen
class ReceiptKeys:
    """The public keys that sign receipts, and that have signed earlier ones."""

    def make(self, ledger: Ledger) -> bytes:
        folder = _key_folder(ledger)
        signing_key(folder)  # the first to ask makes it
        return orjson.dumps(key_set(key.public for key in existing_keys(folder)))


def _key_folder(ledger: Ledger) -> Path:
    """Return the data directory. Raises ReportRefused if the ledger is read without one."""
    if ledger.data_dir is None:
        message = "This server has no receipts: they are signed with a key in the data directory, and it has none."
        raise ReportRefused(message, None, "no_receipts")
    return ledger.data_dir
