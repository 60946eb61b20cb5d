"""The durable ledger: one record per request, first in a write-ahead file and soon after in a database.

    accountant ──Journal──▶ durable_journal.py ──▶ segment_writer.py ──write(2)──▶ DATA_DIR/ledger/*.wal
                                                                                        │ loader.py, in a thread
                                                                                        ▼
                                    reading.py ◀─────────── database.py (SQLite, or PostgreSQL by URL)

`service.py` opens all of it for a server. Reports use `reading.py`; `checking.py`, `exporting.py` and `reconciling.py`
implement commands. docs/operate/ledger.md states the guarantees.
"""
