"""`quipu` that writes down, at SIGUSR2, what it holds: tasks, tracked sequences, open accounts and requests.

    QUIPU_COUNTS=FILE python -m tests.chaos.counted_server serve ...

These counts cannot be seen from outside the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from quipu.actors.accountant.entry_store import EntryStore
from quipu.actors.detokenizer.text_store import TextStore
from quipu.actors.request_desk.desk import RequestDesk

FILE = "QUIPU_COUNTS"


def remember(cls: type[Any], found: list[Any]) -> None:
    """Add each instance of a class to `found` when it is made."""
    make: Callable[..., None] = cls.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        found.append(self)

    cls.__init__ = init


def main() -> int:
    stores: list[EntryStore] = []
    texts: list[TextStore] = []
    desks: list[RequestDesk] = []
    remember(EntryStore, stores)
    remember(TextStore, texts)
    remember(RequestDesk, desks)
    path = Path(os.environ[FILE])

    def write(*_: object) -> None:
        counts = {
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "tracked_sequences": sum(len(each.tracked) + len(each.prompts) for each in texts),
            "open_accounts": sum(each.num_open_accounts for each in stores),
            "open_requests": sum(each.num_open_requests for each in desks),
            "live_sequences": sum(each.num_live_sequences for each in desks),
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(counts))
        part.rename(path)

    signal.signal(signal.SIGUSR2, write)
    from quipu.web.cli.cli import main as quipu

    return quipu(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
