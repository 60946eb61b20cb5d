"""The durable ledger: one record a request, in a write-ahead file first and in a database soon after.

    accountant ──Journal──▶ journal.py ──write(2)──▶ segments.py (DATA_DIR/ledger/*.wal)
                                                          │ loader.py, off the request path
                                                          ▼
                              reading.py ◀────── database.py (SQLite, or PostgreSQL by URL)

`service.py` opens all of it for a server; `reading.py` is for whoever reports; `checking.py`, `exporting.py` and
`reconciling.py` are the commands'. docs/ledger.md says what is guaranteed.
"""
