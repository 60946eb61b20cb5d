"""Blocks in a real S3 server and in a folder: who finds what, and what is never served."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.store import from_url

from quipu.actors.engine.mover.block_header import BlockHeader, checksum_of
from quipu.actors.engine.mover.remote_bucket import BucketLimits
from quipu.actors.engine.mover.remote_health import MAX_FAILURES
from quipu.actors.engine.mover.remote_index import RemoteIndex
from quipu.actors.engine.mover.remote_keys import RemoteKeys
from quipu.actors.engine.mover.remote_object import OVERHEAD_BYTES
from quipu.actors.engine.mover.remote_opening import open_bucket
from quipu.actors.engine.mover.remote_store import UNREADABLE, RemoteStore
from quipu.actors.engine.mover.slot_store import SlotStore
from tests.actors.engine.mover.s3_server import BUCKET, S3Server, running_s3, use_endpoint
from tests.processes import eventually

BLOCK_BYTES = 20_000
NUMERICS = "ab" * 16
LIMITS = BucketLimits(connect_s=10.0, request_s=20.0, whole_s=40.0)
HASTY = BucketLimits(connect_s=0.5, request_s=0.3, whole_s=0.6)
SECRET, ENCRYPTION, OTHER = (hashlib.sha256(word).digest() for word in (b"secret", b"encryption", b"other"))
MANY = 2500
_numbers = itertools.count()
"""Each test has a prefix of its own."""


def keys_of(tenant: str, count: int) -> list[bytes]:
    """Return chain keys as a tenant's prompt has them."""
    return [hashlib.sha256(f"{tenant}/{number}".encode()).digest() for number in range(count)]


KEYS = keys_of("acme", 8)


def block_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK_BYTES)


def header_of(key: bytes, numerics: str = NUMERICS) -> BlockHeader:
    return BlockHeader(key, 16, numerics, checksum_of(memoryview(block_of(key))))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3(tmp_path_factory.mktemp("s3")) as s3:
        yield s3


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    use_endpoint(monkeypatch, server.port)
    return server


class Place:
    """Where objects are, as its owner sees it, who may change anything there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._bucket = from_url(url, client_options={"allow_http": True}) if url.startswith("s3:") else from_url(url)
        self._opened: list[RemoteStore] = []

    @property
    def objects(self) -> dict[str, bytes]:
        """All objects by their paths."""
        paths = [meta["path"] for page in self._bucket.list() for meta in page]
        return {path: bytes(self._bucket.get(path).bytes()) for path in sorted(paths)}

    def put(self, path: str, content: bytes) -> None:
        self._bucket.put(path, content)

    def store(
        self,
        secret: bytes | None = SECRET,
        encryption: bytes | None = None,
        numerics: str = NUMERICS,
        limits: BucketLimits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> RemoteStore:
        """Open a store as a server with these secrets would."""
        keys = RemoteKeys.derive(secret, encryption)
        bucket = open_bucket(self.url, limits)
        store = RemoteStore(bucket, keys, numerics=numerics, block_bytes=BLOCK_BYTES, clock=clock)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kv").mkdir()
    return tmp_path / "kv"


@pytest.fixture
def in_folder(folder: Path) -> Iterator[Place]:
    opened = Place(f"file://{folder}")
    yield opened
    opened.close()


@pytest.fixture
def in_s3(s3: S3Server) -> Iterator[Place]:
    opened = Place(f"s3://{BUCKET}/some/prefix{next(_numbers)}")
    yield opened
    opened.close()


@pytest.fixture(params=["in_s3", "in_folder"])
def place(request: pytest.FixtureRequest) -> Place:
    opened: Place = request.getfixturevalue(request.param)
    return opened


def write(store: SlotStore, keys: list[bytes]) -> None:
    store.write([0] * len(keys), [header_of(key) for key in keys], memoryview(b"".join(map(block_of, keys))))


def read(store: SlotStore, keys: list[bytes]) -> list[BlockHeader | None]:
    """Read blocks, and check that the memory of each is its own, or untouched."""
    memory = memoryview(bytearray(b"\x55" * (BLOCK_BYTES * len(keys))))
    headers = store.read([0] * len(keys), keys, memory)
    for index, (key, header) in enumerate(zip(keys, headers, strict=True)):
        held = bytes(memory[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])
        assert held == (block_of(key) if header == header_of(key) else b"\x55" * BLOCK_BYTES)
    return headers


NOTHING = [None] * 8
WHOLE = [header_of(key) for key in KEYS]


@pytest.mark.parametrize("encryption", [None, ENCRYPTION], ids=["authenticated", "encrypted"])
def test_two_servers_share_blocks(place: Place, encryption: bytes | None) -> None:
    """What one server stores, another with the same secrets and numerics reads, bit by bit, also in another order."""
    one, two = place.store(encryption=encryption), place.store(encryption=encryption)
    assert read(one, KEYS) == NOTHING
    write(one, KEYS)
    assert read(two, KEYS) == WHOLE
    assert read(two, KEYS[::-1]) == WHOLE[::-1]
    assert read(one, [KEYS[0], OTHER, KEYS[1]]) == [WHOLE[0], None, WHOLE[1]]
    write(two, KEYS[:1])
    assert read(one, KEYS) == WHOLE
    assert len(place.objects) == 8


@pytest.mark.parametrize(
    ("secret", "encryption", "numerics"),
    [
        (OTHER, None, NUMERICS),
        (SECRET, ENCRYPTION, NUMERICS),
        (None, ENCRYPTION, NUMERICS),
        (SECRET, None, "cd" * 16),
    ],
    ids=["another secret", "with encryption", "encryption alone", "other numerics"],
)
def test_others_find_nothing(place: Place, secret: bytes | None, encryption: bytes | None, numerics: str) -> None:
    """A server with another secret or other numerics neither reads nor lists what this one stores, nor replaces it."""
    one = place.store()
    write(one, KEYS)
    other = place.store(secret, encryption, numerics)
    assert read(other, KEYS) == NOTHING
    assert [page.names for page in other.list_names()] == [[]]
    if numerics == NUMERICS:
        write(other, KEYS)
        assert len(place.objects) == 16
    assert read(one, KEYS) == WHOLE


def test_another_key_of_encryption_finds_nothing(place: Place) -> None:
    """Two servers that encrypt with different keys do not meet, even with the same secret."""
    one, other = place.store(encryption=ENCRYPTION), place.store(encryption=OTHER)
    write(one, KEYS)
    assert read(other, KEYS) == NOTHING


def test_tenants_do_not_meet(place: Place) -> None:
    """The same prompt of another tenant, whose keys differ, finds nothing; paths and contents name neither."""
    store = place.store(encryption=ENCRYPTION)
    write(store, KEYS)
    assert read(store, keys_of("globex", 8)) == NOTHING
    for path, content in place.objects.items():
        assert not any(key in content or key.hex()[:8] in path for key in KEYS)
        assert NUMERICS.encode() not in content


@pytest.mark.parametrize("encryption", [None, ENCRYPTION], ids=["authenticated", "encrypted"])
def test_whatever_is_changed_in_the_bucket_is_not_served(place: Place, encryption: bytes | None) -> None:
    """An object with a changed head, body or tag, another's, a cut, an extended or an empty one is unreadable."""
    store = place.store(encryption=encryption)
    write(store, KEYS)
    paths = list(place.objects)
    contents = list(place.objects.values())
    forged = [
        b"\x00" + contents[0][1:],
        contents[1][:20] + bytes([contents[1][20] ^ 1]) + contents[1][21:],
        contents[2][:9000] + bytes([contents[2][9000] ^ 1]) + contents[2][9001:],
        contents[3][:-1] + bytes([contents[3][-1] ^ 1]),
        contents[3],  # another block's
        contents[5][:-1000],
        contents[6] + b"\0",
        b"",
    ]
    for path, content in zip(paths, forged, strict=True):
        place.put(path, content)
    assert read(store, KEYS) == [UNREADABLE] * 8
    assert UNREADABLE not in WHOLE
    write(store, KEYS[:4])
    assert read(store, KEYS) == WHOLE[:4] + [UNREADABLE] * 4


def test_an_object_from_another_deployment_is_not_served(place: Place) -> None:
    """An object that someone without the secret puts in the right place, in the right format, is unreadable."""
    store, forger = place.store(), place.store(OTHER)
    write(store, KEYS[:1])
    (ours,) = place.objects
    write(forger, KEYS[:1])
    (theirs,) = place.objects.keys() - {ours}
    place.put(ours, place.objects[theirs])
    assert read(store, KEYS[:1]) == [UNREADABLE]


def test_a_huge_object_is_not_read(in_folder: Place, folder: Path) -> None:
    """An object of a terabyte in a block's place costs neither memory nor time."""
    store = in_folder.store()
    write(store, KEYS[:1])
    (path,) = in_folder.objects
    with (folder / path).open("r+b") as file:
        file.truncate(1 << 40)
    began = time.monotonic()
    assert read(store, KEYS[:1]) == [UNREADABLE]
    assert time.monotonic() - began < 10


def test_a_block_with_other_numerics_is_not_stored(place: Place) -> None:
    """A header that does not belong to this store is an error, and nothing is stored."""
    with pytest.raises(OSError, match="other numerics"):
        place.store().write([0], [header_of(KEYS[0], "cd" * 16)], memoryview(block_of(KEYS[0])))
    assert place.objects == {}


def test_names_are_listed(place: Place) -> None:
    """A listing finds what was stored, and an index after it holds that, and nothing else."""
    store = place.store()
    write(store, KEYS[:6])
    path, content = next(iter(place.objects.items()))
    place.put("README", content)
    place.put(f"{store.names.folder}/README", content)
    place.put(path[:-28] + "0000" + path[-24:], b"x")  # a name like ours, but not its size
    index = RemoteIndex(store.names)
    index.begin_listing(0)
    for page in store.list_names():
        index.add_page(page, 0)
    assert [index.holds(key) for key in KEYS] == [True] * 6 + [False] * 2
    assert len(index) == 6
    assert index.next_listing_at is not None


def test_an_empty_bucket_is_listed(place: Place) -> None:
    """A listing before anything was stored is complete, and empty."""
    assert [(page.names, page.is_last) for page in place.store().list_names()] == [([], True)]


def test_many_objects_are_listed(s3: S3Server, in_s3: Place) -> None:
    """A listing of 2,500 objects, which has three pages at the server, finds all of them."""
    store = in_s3.store()
    names = {store.names.name_of(key) for key in keys_of("many", MANY)}
    for name in names:  # by its files: storing that many through the server takes half a minute
        path = s3.folder / in_s3.url.removeprefix("s3://") / store.names.path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(BLOCK_BYTES + OVERHEAD_BYTES)
    pages = list(store.list_names())
    listed = [name for page in pages for name in page.names]
    assert set(listed) == names
    assert len(listed) == MANY
    assert max(len(page.names) for page in pages) <= 256
    assert [page.is_last for page in pages] == [False] * (len(pages) - 1) + [True]


def test_many_threads_read_at_once(place: Place) -> None:
    """Twenty threads read eight blocks each, at the same time, and each gets its own."""
    store = place.store()
    keys = keys_of("threads", 40)
    for first in range(0, 40, 8):
        write(store, keys[first : first + 8])
    failures: list[BaseException] = []

    def read_some(seed: int) -> None:
        try:
            mine = random.Random(seed).sample(keys, 8)
            assert read(store, mine) == [header_of(key) for key in mine]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read_some, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_files_are_closed_to_others(in_folder: Place, folder: Path) -> None:
    """In a folder, objects and what contains them can be read by their owner only."""
    write(in_folder.store(), KEYS)
    assert {(folder / path).stat().st_mode & 0o777 for path in in_folder.objects} == {0o600}
    assert (folder / "v1").stat().st_mode & 0o777 == 0o700


def test_a_server_that_is_down_is_left_alone(s3: S3Server, in_s3: Place) -> None:
    """After three failures nobody waits for a server that is down; once it is back, blocks are read again."""
    now = [1000.0]
    store = in_s3.store(limits=HASTY, clock=lambda: now[0])
    patient = in_s3.store()
    write(patient, KEYS[:4])
    s3.kill()
    try:
        for _ in range(MAX_FAILURES):
            with pytest.raises(OSError, match="GET"):
                read(store, KEYS)
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(OSError, match="not asked: 3 attempts in a row"):
                read(store, KEYS)
        assert time.monotonic() - began < 100 * HASTY.request_s / 2
        with pytest.raises(OSError, match="PUT"):  # not held back by loads
            write(store, KEYS)
        now[0] += 1.5
        with pytest.raises(OSError, match="GET"):
            read(store, KEYS)
        now[0] += 1.5
        with pytest.raises(OSError, match="not asked: 4 attempts in a row"):
            read(store, KEYS)
    finally:
        s3.start()
    back = in_s3.store(limits=LIMITS, clock=lambda: now[0])
    assert read(back, KEYS) == WHOLE[:4] + [None] * 4

    def reads_again() -> bool:
        now[0] += 60.0
        try:
            return read(store, KEYS) == WHOLE[:4] + [None] * 4
        except OSError:
            return False

    eventually(reads_again, "the server is asked again, and answers")
    assert read(store, KEYS) == WHOLE[:4] + [None] * 4


def test_wrong_credentials_are_an_error(in_s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refuses the signature is an error for loads, stores and listings, which shows no secret."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped-secret")
    store = in_s3.store()
    for call in (lambda: read(store, KEYS), lambda: write(store, KEYS), lambda: list(store.list_names())):
        with pytest.raises(OSError, match="403 Forbidden") as caught:
            call()
        assert "mistyped-secret" not in str(caught.value)


def test_a_bucket_that_does_not_exist_is_an_error(s3: S3Server) -> None:
    """A missing bucket is not taken for an empty one."""
    place = Place("s3://other-bucket/p")
    store = place.store()
    for call in (lambda: read(store, KEYS), lambda: write(store, KEYS), lambda: list(store.list_names())):
        with pytest.raises(OSError, match="404 Not Found"):
            call()
    place.close()


def test_prefixes_are_separate(in_s3: Place) -> None:
    """Two prefixes of a bucket share nothing; the path of an object begins with the prefix."""
    write(in_s3.store(), KEYS)
    shorter, longer = Place(in_s3.url[:-1]), Place(f"{in_s3.url}/v1")
    assert read(shorter.store(), KEYS) == NOTHING
    assert [page.names for page in shorter.store().list_names()] == [[]]
    assert list(longer.objects) == [path.removeprefix("v1/") for path in in_s3.objects]
    shorter.close()
    longer.close()
