"""The durable ledger: one record per request, first in a write-ahead file and soon after in a database.

    accountant ──Journal──▶ journal.py ──write(2)──▶ segments.py (DATA_DIR/ledger/*.wal)
                                                          │ loader.py, off the request path
                                                          ▼
                              reading.py ◀────── database.py (SQLite, or PostgreSQL by URL)

`service.py` opens all of it for a server. Reports use `reading.py`; `checking.py`, `exporting.py` and `reconciling.py`
implement commands. docs/ledger.md states the guarantees.
"""
