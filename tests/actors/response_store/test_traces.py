"""What is deleted, or has expired, is in no file of the store, not even in its log."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from quipu.actors.response_store.stored import Kind, StoredItem
from tests.actors.response_store.stores import TTL_S, Store, bytes_on_disk, open_tables

SIZES = (10, 60, 300, 900, 2_000, 4_000, 5_000, 9_000, 40_000)


def secret(number: int, num_chars: int) -> str:
    """Return a text that is its number again and again, so that every part of it can be found."""
    word = f"<{number:06d}>"
    return word * (num_chars // len(word) + 1)


def leaked(folder: Path, numbers: set[int]) -> set[int]:
    data = bytes_on_disk(folder)
    return {number for number in numbers if f"{number:06d}".encode() in data}


@pytest.mark.parametrize("seed", range(3))
def test_random_deletions(tmp_path: Path, seed: int) -> None:
    """However objects are stored, changed, deleted and expire, nothing of what was deleted is left."""
    rng = random.Random(seed)
    store = open_tables(tmp_path)
    live: dict[str, set[int]] = {}
    """Secrets by object."""
    number = 0

    def texts(count: int) -> list[str]:
        nonlocal number
        made = []
        for _ in range(count):
            number += 1
            made.append(secret(number, rng.choice(SIZES)))
        return made

    for step in range(120):
        first = number + 1
        choice = rng.random()
        name = f"o{step}"
        if choice < 0.4:
            store.create(Kind.RESPONSE, name, *texts(rng.randint(1, 4)), is_open=True)
            (answer, head, events) = texts(3)
            assert store.end(name, answer, head=head.encode(), events=events.encode())
            live[name] = set(range(first, number + 1))
        elif choice < 0.55:
            (label, *said) = texts(3)
            store.create(Kind.CONVERSATION, name, *said, metadata={"k": label[:400]})
            live[name] = set(range(first, number + 1))
        elif choice < 0.65 and (conversations := [o for o in live if store.find(o, kind=Kind.CONVERSATION)]):
            name = rng.choice(conversations)
            item = StoredItem(f"i{step}", texts(1)[0].encode())
            assert store.tables.append("t", name, [item])
            if rng.random() < 0.5:
                assert store.tables.delete_item("t", name, item.item_id)
            else:
                live[name].add(number)
        elif live:
            name = rng.choice(list(live))
            assert any(store.tables.delete("t", kind, name) for kind in (Kind.RESPONSE, Kind.CONVERSATION))
            del live[name]
        if step % 25 == 24:
            kept = set().union(*live.values()) if live else set()
            assert leaked(tmp_path, set(range(1, number + 1)) - kept) == set()
    kept = set().union(*live.values())
    assert leaked(tmp_path, kept) == kept, "what is stored can be found, so the search is right"
    store.clock.now += TTL_S + 1
    while store.tables.expire():
        pass
    assert set(store.counts().values()) == {0}
    assert leaked(tmp_path, set(range(1, number + 1))) == set()
    store.connection.close()


def test_replaced_metadata(store: Store, tmp_path: Path) -> None:
    """Metadata that was replaced is gone."""
    store.create(Kind.CHAT, "c", metadata={"k": "before-the-change"})
    store.tables.relabel("t", Kind.CHAT, "c", {"k": "after"})
    assert b"before-the-change" not in bytes_on_disk(tmp_path) and b"after" in bytes_on_disk(tmp_path)


def test_evicted(tmp_path: Path) -> None:
    """What a full store has deleted is gone when its house is kept the next time."""
    store = open_tables(tmp_path, max_bytes=1_000_000)
    for number in range(100):
        store.respond(f"r{number}", secret(number, 30_000))
    gone = {number for number in range(100) if store.find(f"r{number}") is None}
    store.tables.expire()
    assert gone and leaked(tmp_path, gone) == set()
    store.connection.close()


_DIE = """
import os, signal, sys
from pathlib import Path
from quipu.actors.response_store.stored import Kind
from quipu.actors.response_store.store_space import StoreSpace
from tests.actors.response_store.stores import open_tables
store = open_tables(Path(sys.argv[1]))
for number in range(20):
    store.respond(f"r{number}", f"<{number:06d}>" * 500)
StoreSpace.purge = lambda self: os.kill(os.getpid(), signal.SIGKILL)
store.tables.delete("t", Kind.RESPONSE, "r7")
"""


def test_death_between_deletion_and_purge(tmp_path: Path) -> None:
    """A server that is killed after it has deleted, and before its log is truncated, leaves traces: the next start
    removes them.
    """
    ended = subprocess.run([sys.executable, "-c", _DIE, str(tmp_path)], check=False)
    assert ended.returncode == -9
    assert leaked(tmp_path, {7}) == {7}
    store = open_tables(tmp_path)
    assert leaked(tmp_path, set(range(20))) == set(range(20)) - {7}
    assert store.find("r7") is None and store.find("r8") is not None
    store.connection.close()
