"""What is stored, found, continued and deleted."""

from __future__ import annotations

import sqlite3
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from quipu.actors.response_store.object_tables import Call
from quipu.actors.response_store.store_file import SCHEMA_VERSION, open_file
from quipu.actors.response_store.stored import (
    ContextTooLong,
    Kind,
    NewObject,
    NoSuchItem,
    PageQuery,
    State,
    StoredItem,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from quipu.actors.shared import private_database
from tests.actors.response_store.stores import TTL_S, Store, bytes_on_disk, open_tables

BIG = "x" * 50_000


def pages(
    store: Store, name: str, *, kind: Kind = Kind.RESPONSE, limit: int = 2, ascending: bool = True
) -> list[bytes]:
    """Return all items that went into an object, page by page."""
    data: list[bytes] = []
    after: str | None = None
    while True:
        page = store.tables.page("t", kind, name, PageQuery(after=after, limit=limit, is_ascending=ascending))
        assert page is not None and len(page.data) <= limit
        data += page.data
        if not page.has_more:
            return data
        after = page.ids[-1]


def test_open_and_whole(store: Store) -> None:
    """An object is open until its answer is complete; then it has the answer."""
    store.create(Kind.RESPONSE, "a", "question", is_open=True)
    found = store.find("a")
    assert found is not None and found.state is State.OPEN and not found.output
    assert store.end("a", "answer", events=b"events")
    found = store.find("a")
    assert found is not None and found.state is State.WHOLE and found.head == b'{"is":"a"}'
    assert (
        found.output == [StoredItem("a-out", b"answer")]
        and found.has_events
        and store.tables.events("t", "a") == b"events"
    )
    assert not store.end("a"), "it ends once"
    assert not store.end("b"), "and only if it was begun"


def test_chain_is_flat(store: Store) -> None:
    """A response has everything before it, in order, without a copy: each item is stored once."""
    store.respond("a", "q1", said="a1")
    for before, name in pairwise("abcdefgh"):
        store.respond(name, f"q{name}", after=before, said=f"a{name}")
    assert store.context_of("c") == [b"q1", b"a1", b"qb", b"ab", b"qc", b"ac"]
    assert len(store.context_of("h")) == 16 == store.counts()["items"]
    assert pages(store, "c") == [b"q1", b"a1", b"qb", b"ab", b"qc"], "what went in"
    assert pages(store, "c", ascending=False) == [b"qc", b"ab", b"qb", b"a1", b"q1"]


def test_deleting_within_a_chain(store: Store) -> None:
    """What others continue stays for them, and is deleted with the last of them."""
    store.respond("a", "q1", said="a1")
    store.respond("b", "q2", after="a", said="a2")
    store.respond("c", "q3", after="a", said="a3")
    assert store.tables.delete("t", Kind.RESPONSE, "a") and store.find("a") is None
    assert store.tables.context("t", Kind.RESPONSE, "a", 99, 99) is None
    assert store.context_of("b") == [b"q1", b"a1", b"q2", b"a2"]
    assert store.tables.delete("t", Kind.RESPONSE, "b")
    assert store.context_of("c") == [b"q1", b"a1", b"q3", b"a3"] and store.counts()["items"] == 4
    assert store.tables.delete("t", Kind.RESPONSE, "c")
    assert set(store.counts().values()) == {0}
    assert not store.tables.delete("t", Kind.RESPONSE, "c")


def test_continuing_what_is_gone(store: Store) -> None:
    """A response whose beginning was deleted since it was looked up is not stored, and nothing of it remains."""
    store.respond("a", "q1", said="a1")
    context = store.tables.context("t", Kind.RESPONSE, "a", 99, 99)
    assert context is not None
    store.tables.delete("t", Kind.RESPONSE, "a")
    new = NewObject(
        object_id="b", tenant="t", kind=Kind.RESPONSE, created_at=1, head=b"{}", context=context.segments,
        items=[StoredItem("i", b"q2")],
    )  # fmt: skip
    assert not store.tables.begin(new)
    assert set(store.counts().values()) == {0}


def test_context_is_measured_before_it_is_read(store: Store) -> None:
    """A context beyond the limits is refused with its size."""
    store.respond("a", "12345", "678", said="90")
    with pytest.raises(ContextTooLong) as error:
        store.tables.context("t", Kind.RESPONSE, "a", 9, 99)
    assert (error.value.num_bytes, error.value.num_items) == (10, 3)
    with pytest.raises(ContextTooLong):
        store.tables.context("t", Kind.RESPONSE, "a", 99, 2)
    assert len(store.context_of("a")) == 3


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_pages(store: Store, limit: int) -> None:
    """Pages of any size have each item once, in either order, over the segments of a chain."""
    store.respond("a", "1", "2", "3", said="4")
    store.respond("b", after="a")
    store.respond("c", "5", "6", after="b", said="7")
    expected = [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert pages(store, "c", limit=limit) == expected
    assert pages(store, "c", limit=limit, ascending=False) == expected[::-1]


def test_page_after_an_unknown_item(store: Store) -> None:
    """A cursor that is in no list is an error, and an unknown object is none."""
    store.respond("a", "1")
    with pytest.raises(NoSuchItem):
        store.tables.page("t", Kind.RESPONSE, "a", PageQuery(after="no"))
    assert store.tables.page("t", Kind.RESPONSE, "no", PageQuery()) is None


def test_large_pages_end_early(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has few items if they are large, and says that there are more."""
    monkeypatch.setattr("quipu.actors.response_store.item_tables.MAX_PAGE_BYTES", 60_000)
    store.respond("a", BIG, BIG, BIG)
    page = store.tables.page("t", Kind.RESPONSE, "a", PageQuery(is_ascending=True))
    assert page is not None and len(page.data) == 2 and page.has_more
    assert len(pages(store, "a", limit=20)) == 3


def test_tenants(store: Store) -> None:
    """Nothing that another tenant asks for is found."""
    store.respond("a", "1", said="2")
    store.create(Kind.CONVERSATION, "c", "1")
    tables = store.tables
    assert tables.find("u", Kind.RESPONSE, "a") is None
    assert tables.context("u", Kind.RESPONSE, "a", 99, 99) is None
    assert tables.page("u", Kind.RESPONSE, "a", PageQuery()) is None
    assert not tables.delete("u", Kind.RESPONSE, "a") and not tables.delete("u", Kind.CONVERSATION, "c")
    assert not tables.append("u", "c", [StoredItem("i", b"2")])
    assert tables.item("u", Kind.CONVERSATION, "c", "c-0") is None and not tables.delete_item("u", "c", "c-0")
    assert tables.relabel("u", Kind.CONVERSATION, "c", {}) is None
    assert tables.list_objects("u", Kind.CONVERSATION, PageQuery(), None, {}).objects == []
    assert store.find("a") is not None and store.context_of("c", kind=Kind.CONVERSATION) == [b"1"]
    assert tables.find("t", Kind.CHAT, "a") is None, "and nothing of another kind"


def test_conversation(store: Store) -> None:
    """A conversation has its items in the order in which they came, those of a response behind the others."""
    store.create(Kind.CONVERSATION, "c", "1", metadata={"k": "v"})
    assert store.tables.append("t", "c", [StoredItem("x", b"2")])
    assert store.tables.item("t", Kind.CONVERSATION, "c", "x") == b"2"
    store.create(Kind.RESPONSE, "a", "3", is_open=True)
    assert store.end("a", "4", conversation="c")
    assert store.context_of("c", kind=Kind.CONVERSATION) == [b"1", b"2", b"3", b"4"]
    assert store.tables.delete_item("t", "c", "x") and not store.tables.delete_item("t", "c", "x")
    assert pages(store, "c", kind=Kind.CONVERSATION) == [b"1", b"3", b"4"]
    assert store.tables.delete("t", Kind.CONVERSATION, "c")
    found = store.find("a")
    assert found is not None and [item.data for item in found.output] == [b"4"], "its responses stay"
    store.create(Kind.RESPONSE, "b", "5", is_open=True)
    assert store.end("b", "6", conversation="c"), "a conversation that is gone is not extended"


def test_list_by_model_and_metadata(store: Store) -> None:
    """Objects are listed by model and metadata, in either order, page by page."""
    for number in range(6):
        labels = {"even": str(number % 2 == 0), "n": str(number)}
        store.create(Kind.CHAT, f"c{number}", model="m" if number < 4 else "other", metadata=labels)

    def ids(
        model: str | None = None, *, after: str | None = None, limit: int = 20, ascending: bool = True, **labels: str
    ) -> list[str]:
        query = PageQuery(after=after, limit=limit, is_ascending=ascending)
        page = store.tables.list_objects("t", Kind.CHAT, query, model, labels)
        assert page.has_more == (len(page.objects) == limit)
        return [found.object_id for found in page.objects]

    assert ids() == ["c0", "c1", "c2", "c3", "c4", "c5"]
    assert ids("m", even="True") == ["c0", "c2"] and ids(even="True", n="4") == ["c4"] and ids(n="9") == []
    assert ids(limit=2, after="c1") == ["c2", "c3"] and ids(limit=2, after="c4", ascending=False) == ["c3", "c2"]
    with pytest.raises(NoSuchItem):
        ids(after="no")
    found = store.tables.relabel("t", Kind.CHAT, "c0", {"n": "9"})
    assert found is not None and found.metadata == b'{"n":"9"}'
    assert ids(n="9") == ["c0"] and ids("m", even="True") == ["c2"]


def test_expiry(store: Store) -> None:
    """An object is found until its time is over, and is then deleted; an open one is not."""
    store.respond("a", "1", said="2")
    store.create(Kind.RESPONSE, "open", "3", is_open=True)
    store.clock.now += TTL_S - 1
    store.respond("b", "4", after="a")
    store.create(Kind.CONVERSATION, "c", "5")
    assert not store.tables.expire() and store.find("a") is not None
    store.clock.now += 2
    assert store.find("a") is None, "even before it is deleted"
    store.tables.expire()
    assert store.counts()["objects"] == 3 and store.find("open") is not None
    assert store.context_of("b") == [b"1", b"2", b"4"], "who continues it has it as long as itself"
    store.tables.append("t", "c", [StoredItem("x", b"6")])
    store.clock.now += TTL_S - 1
    store.tables.expire()
    assert store.find("b") is None and store.find("c", kind=Kind.CONVERSATION) is not None, "a change extends the time"
    assert store.tables.space.num_expired == 2


def test_recovery(tmp_path: Path) -> None:
    """What a dead server left open is marked if it was in the background, and deleted otherwise."""
    store = open_tables(tmp_path)
    store.respond("whole", "1")
    store.create(Kind.RESPONSE, "background", "2", is_open=True, is_background=True)
    store.create(Kind.RESPONSE, "awaited", "3", is_open=True)
    store.connection.close()
    store = open_tables(tmp_path)
    assert store.tables.recover() == 1
    found = store.find("background")
    assert found is not None and found.state is State.LOST and store.find("awaited") is None
    whole = store.find("whole")
    assert whole is not None and whole.state is State.WHOLE
    assert store.counts()["items"] == 2
    store.connection.close()


def test_full(tmp_path: Path) -> None:
    """A full store deletes what expires next, of the tenant with most, and never what is written or open."""
    store = open_tables(tmp_path, max_bytes=3_000_000, ttl_s=10_000)
    store.create(Kind.RESPONSE, "open", BIG, is_open=True)
    for number in range(5):
        store.clock.now += 1
        store.respond(f"small{number}", BIG, tenant="small")
    for number in range(200):
        store.clock.now += 1
        store.respond(f"r{number}", BIG)
        assert store.tables.space.used_bytes <= 3_000_000
    assert store.find("r0") is None and store.find("r199") is not None and store.find("open") is not None
    assert all(store.find(f"small{number}", tenant="small") is not None for number in range(5))
    num_left = store.counts()["objects"] - 6
    assert store.tables.space.num_evicted == 200 - num_left and num_left > 40
    with pytest.raises(StoreFull):
        store.respond("huge", "x" * 3_000_000)
    assert store.find("r199") is not None and store.find("huge") is None, "what cannot fit deletes nothing"
    store.connection.close()


def test_abandoned_call_changes_nothing(store: Store) -> None:
    """What a caller has stopped waiting for is rolled back."""
    store.tables.call = Call(is_abandoned=True)
    with pytest.raises(StoreUnavailable):
        store.respond("a", "1")
    assert set(store.counts().values()) == {0}
    store.tables.call = Call()
    store.respond("a", "1")


def test_file_is_private(tmp_path: Path, store: Store) -> None:
    """Only the owner may read the file and its log."""
    store.respond("a", "1")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes) == {"responses.sqlite3", "responses.sqlite3-wal"} and set(modes.values()) == {0o600}


@pytest.mark.parametrize(
    "content", [b"no database at all, but long enough to be one" * 30, b"SQLite format 3\0" + b"\xff" * 4096]
)
def test_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    """A damaged file is refused at the start, with what to do."""
    path = tmp_path / "responses.sqlite3"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"cannot use the response store .*Move it away"):
        open_file(path)
    assert path.read_bytes() == content


def test_logprobs_stay_with_the_answer(store: Store) -> None:
    """Logprobs come back with the answer that they belong to, and into nothing that continues it."""
    told = StoredItem("a-out", b"answer", b"[1]")
    store.create(Kind.CONVERSATION, "c")
    store.create(Kind.RESPONSE, "a", "question", is_open=True)
    assert store.end("a", conversation="c", items=[told])
    found = store.find("a")
    assert found is not None and found.output == [told]
    assert store.context_of("a") == [b"question", b"answer"] == store.context_of("c", kind=Kind.CONVERSATION)
    assert store.tables.delete("t", Kind.RESPONSE, "a") and b"[1]" not in bytes_on_disk(store.path.parent)


def test_file_of_the_first_version(tmp_path: Path) -> None:
    """A file that was written before there were logprobs keeps its objects, and takes some with logprobs."""
    store = open_tables(tmp_path)
    store.respond("a", "question", said="answer")
    store.connection.execute("ALTER TABLE items DROP COLUMN logprobs")
    store.connection.execute("PRAGMA user_version=1")
    store.connection.close()
    store = open_tables(tmp_path)
    found = store.find("a")
    assert found is not None and found.output == [StoredItem("a-out", b"answer")]
    store.create(Kind.RESPONSE, "b", is_open=True)
    assert store.end("b", items=[StoredItem("x", b"y", b"[2]")])
    store.connection.close()
    assert open_file(store.path).execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_newer_file(tmp_path: Path) -> None:
    """A file of a newer version is refused, not changed."""
    store = open_tables(tmp_path)
    store.connection.execute("PRAGMA user_version=99")
    store.connection.close()
    with pytest.raises(StoreError, match="newer version"):
        open_file(store.path)


def test_file_in_use(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers cannot have the same file, and nobody else can read it meanwhile."""
    open_at_once = partial(private_database.open_private_database, lock_s=0.0)
    monkeypatch.setattr("quipu.actors.response_store.store_file.open_private_database", open_at_once)
    with pytest.raises(StoreError, match="Another process has it open"):
        open_file(store.path)
    reader = sqlite3.connect(store.path, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        reader.execute("SELECT * FROM objects")
    reader.close()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A data directory that cannot exist is an error for the operator."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot open the response store"):
        open_file(tmp_path / "file" / "responses.sqlite3")
