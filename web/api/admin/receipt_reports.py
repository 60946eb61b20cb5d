"""The receipt of a record, and the keys that check receipts, as reports: made in the process that reads the ledger.

What must always hold: no web framework is imported, which the process would load first.
"""

from __future__ import annotations

import attrs
import orjson

from quipu.actors.ledger.reading import LedgerError, Query
from quipu.actors.ledger.receipt_keys import existing_keys, key_set, signing_key
from quipu.actors.ledger.receipts import make_receipt

from .reports import Ledger
from .shown_record import shown_record


@attrs.frozen
class ReceiptReport:
    """The receipt of the first record of a query; empty without one."""

    query: Query

    def make(self, ledger: Ledger) -> bytes:
        found = next(ledger.records(self.query), None)
        if found is None:
            return b""
        if ledger.data_dir is None:
            raise LedgerError("receipts are signed with a key in the data directory")
        shown = shown_record(found, for_admin=False)
        return orjson.dumps(make_receipt(ledger, found, shown, signing_key(ledger.data_dir)))


@attrs.frozen
class ReceiptKeys:
    """The public keys that sign receipts, and that have signed earlier ones."""

    def make(self, ledger: Ledger) -> bytes:
        if ledger.data_dir is None:
            raise LedgerError("receipts are signed with a key in the data directory")
        signing_key(ledger.data_dir)  # the first to ask makes it
        return orjson.dumps(key_set(key.public for key in existing_keys(ledger.data_dir)))
