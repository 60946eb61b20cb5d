"""The records of requests whose clients left just before the actors stop.

A client that has left holds nothing of the desk any more, but its request's account closes only once the engine has
ended its sequences, which takes a step. Used by whoever stops the actors, before it does.
"""

from __future__ import annotations

from typing import Final

import trio

from .accountant.entry_store import EntryStore

LAST_RECORDS_S: Final = 5.0
"""How long to wait. Accounts that are open after that are closed by the next start on the same folder."""
POLL_S: Final = 0.01


async def wait_accounts_closed(store: EntryStore) -> None:
    """Wait until no account is open, for `LAST_RECORDS_S` at most."""
    with trio.move_on_after(LAST_RECORDS_S):
        while store.num_open_accounts:  # noqa: ASYNC110 - at the end only; the store is asked, it does not call
            await trio.sleep(POLL_S)
