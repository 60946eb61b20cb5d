"""What clients asked the server to keep: responses, conversations and chat completions, in a database of its own.

    web/api/openai/ ──calls──▶ response_store.py ──a worker thread──▶ object_tables.py, item_tables.py
                                                                          │ store_file.py
                                                                          ▼
                                                               DATA_DIR/responses.sqlite3

`stored.py` has the values that are exchanged. docs/decisions/0020-a-database-for-responses.md says why it is no part of
the ledger; docs/use/stored-responses.md states what clients may rely on.
"""
