"""An object store that fails in every way that a server or a network can: a call ends in time, with an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from quipu.actors.engine.mover.remote_bucket import Bucket, BucketLimits, ListedObject, WrongLength
from quipu.actors.engine.mover.remote_opening import open_bucket
from tests.actors.engine.mover.faulty_s3 import FaultyS3, S3Request, listing_page, running_faulty_s3
from tests.actors.engine.mover.s3_server import use_endpoint
from tests.processes import eventually

LIMITS = BucketLimits(connect_s=10.0, request_s=20.0, whole_s=40.0)
"""Long, because the machine may be busy."""
HASTY = BucketLimits(connect_s=0.5, request_s=0.3, whole_s=0.6)
CONTENT = bytes(range(256)) * 4096
PATH = "v1/aa/object"
STORED = f"some/prefix/{PATH}"
MUCH = 1 << 40


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with running_faulty_s3() as s3:
        yield s3


@pytest.fixture
def s3(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    use_endpoint(monkeypatch, server.port)
    server.objects = {STORED: CONTENT}
    server.requests.clear()
    server.num_bytes_sent, server.page_size = 0, 1000
    yield server
    server.fault = None
    server.released.set()
    server.released = threading.Event()


@pytest.fixture
def bucket(s3: FaultyS3) -> Iterator[Bucket]:
    opened = open_bucket("s3://kv/some/prefix", LIMITS)
    yield opened
    opened.close()


@pytest.fixture
def hasty(s3: FaultyS3) -> Iterator[Bucket]:
    opened = open_bucket("s3://kv/some/prefix", HASTY)
    yield opened
    opened.close()


def answering(status: int, body: bytes = b"", **headers: str) -> Callable[[S3Request], bool]:
    def answer(request: S3Request) -> bool:
        request.answer(status, body, **headers)
        return True

    return answer


def hang(request: S3Request) -> bool:
    request.hang()
    return True


def hang_in_body(request: S3Request) -> bool:
    request.begin(200, len(CONTENT))
    request.send(CONTENT[:1000])
    request.hang()
    return True


def cut_body(request: S3Request) -> bool:
    request.begin(200, len(CONTENT))
    request.send(CONTENT[:1000])
    request.close_connection = True
    return True


def trickle(request: S3Request) -> bool:
    request.begin(200, len(CONTENT))
    while not (request.close_connection or request.s3.released.wait(0.01)):
        request.send(b"x")
    return True


def close(request: S3Request) -> bool:
    request.connection.close()
    request.close_connection = True
    return True


def no_http(request: S3Request) -> bool:
    request.send(b"\x00\xff no HTTP \r\n\r\n")
    request.close_connection = True
    return True


def redirect_to_itself(request: S3Request) -> bool:
    return answering(307, location=f"http://127.0.0.1:{request.s3.port}{request.path}")(request)


def no_length(request: S3Request) -> bool:
    request.begin(200, None, transfer_encoding="chunked")
    request.send(b"0\r\n\r\n")
    return True


ERROR = b"<Error><Code>Code</Code></Error>"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
FAULTS: dict[str, Callable[[S3Request], bool]] = {
    **{str(status): answering(status, ERROR) for status in (400, 401, 403, 409, 429, 500, 501, 503)},
    "304": answering(304),  # it has no body
    "SlowDown": answering(503, SLOW_DOWN),
    "NoSuchBucket": answering(404, b"<Error><Code>NoSuchBucket</Code></Error>"),
    "long error": answering(500, b"x" * 500_000),
    "redirect loop": redirect_to_itself,
    "hang": hang,
    "close": close,
    "no HTTP": no_http,
}
FAULTS_OF_BODIES: dict[str, Callable[[S3Request], bool]] = {
    "hang in body": hang_in_body,
    "cut body": cut_body,
    "trickle": trickle,
    "no length": no_length,
    "206": answering(206, b"<<<"),
}
"""The head of the answer is in order."""
HANGING = {"hang", "hang in body", "trickle"}


def outcome_of(call: Callable[[], Any]) -> BaseException | None:
    """Return what a call raises, and check that it ends within its limits."""
    began = time.monotonic()
    try:
        call()
    except (OSError, WrongLength) as error:
        return error
    finally:
        assert time.monotonic() - began < LIMITS.request_s / 2
    return None


@pytest.mark.parametrize("name", [*FAULTS, *FAULTS_OF_BODIES])
def test_every_fault_of_a_get_is_an_error_in_time(s3: FaultyS3, bucket: Bucket, hasty: Bucket, name: str) -> None:
    """Whatever the server does instead of answering, a GET ends in an error with a short reason, never in bytes."""
    s3.fault = (FAULTS | FAULTS_OF_BODIES)[name]
    error = outcome_of(lambda: (hasty if name in HANGING else bucket).get(PATH, len(CONTENT)))
    assert error is not None
    assert "\n" not in str(error)
    assert len(str(error)) < 700
    assert len(s3.requests) <= 11  # redirects are followed ten times
    s3.fault = None
    s3.released.set()
    assert bucket.get(PATH, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_a_put_or_a_list_is_an_error_in_time(
    s3: FaultyS3, bucket: Bucket, hasty: Bucket, name: str
) -> None:
    """So do a PUT and a LIST."""
    s3.fault = FAULTS[name]
    asked = hasty if name in HANGING else bucket
    assert isinstance(outcome_of(lambda: asked.put(PATH, CONTENT)), OSError)
    assert isinstance(outcome_of(lambda: list(asked.list_objects("v1"))), OSError)


def test_an_object_that_is_not_there_is_none(bucket: Bucket) -> None:
    """A 404 for the object is an answer, not an error."""
    assert bucket.get("v1/aa/other", 10) is None


def test_a_fault_that_passes_is_retried(s3: FaultyS3, bucket: Bucket) -> None:
    """Two errors of the server in a row are not seen by the caller; a third is."""
    for num_errors, fails in ((2, False), (3, True)):
        answers = iter([answering(503)] * num_errors)
        s3.fault = lambda request, answers=answers: (answer := next(answers, None)) is not None and answer(request)
        assert (outcome_of(lambda: bucket.get(PATH, len(CONTENT))) is not None) == fails


@pytest.mark.parametrize("num_bytes", [len(CONTENT) - 1, len(CONTENT) + 1, 0])
def test_an_object_of_another_length_is_not_read(s3: FaultyS3, bucket: Bucket, num_bytes: int) -> None:
    """The length in the answer's head decides before the body is read."""
    with pytest.raises(WrongLength):
        bucket.get(PATH, num_bytes)


def test_an_endless_body_is_cut_off(s3: FaultyS3, bucket: Bucket) -> None:
    """A body of a terabyte is not read, and one that never ends although its head says it is short, only at first."""

    def send_much(request: S3Request) -> bool:
        request.begin(200, MUCH)
        while not request.close_connection:
            request.send(CONTENT)
        return True

    def send_chunks(request: S3Request) -> bool:
        request.begin(200, 10, transfer_encoding="chunked")
        while not request.close_connection:
            request.send(b"10000\r\n" + bytes(65536) + b"\r\n")
        return True

    for fault in (send_much, send_chunks):
        s3.fault, s3.num_bytes_sent = fault, 0
        assert isinstance(outcome_of(lambda: bucket.get(PATH, 10)), WrongLength)
        assert s3.num_bytes_sent < 1 << 26  # what the sockets hold


def test_an_unreachable_server_is_an_error_in_time(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port where nobody listens, and a name that no resolver knows, end like any other fault."""
    for endpoint in ("http://127.0.0.1:1", "http://nowhere.invalid"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        bucket = open_bucket("s3://kv/some/prefix", HASTY)
        assert isinstance(outcome_of(lambda bucket=bucket: bucket.get(PATH, 1)), OSError)
        assert isinstance(outcome_of(lambda bucket=bucket: bucket.put(PATH, b"")), OSError)


def test_a_listing_comes_in_pages(s3: FaultyS3, bucket: Bucket) -> None:
    """Objects below the folder are listed with their sizes, across the server's pages, in small ones."""
    s3.page_size = 100
    s3.objects = {f"some/prefix/v1/x/{number:05}": bytes(number % 7) for number in range(1050)}
    s3.objects |= {"some/prefix/v10/x": b"", "some/v1/x": b"", "elsewhere": b""}
    pages = list(bucket.list_objects("v1"))
    assert max(map(len, pages)) <= 256
    assert [item for page in pages for item in page] == [
        ListedObject(f"v1/x/{number:05}", number % 7) for number in range(1050)
    ]
    assert sum("list-type" in request for request in s3.requests) == 11


@pytest.mark.parametrize("page", [b"this is no XML <<<", b"<ListBucketResult><Contents/></ListBucketResult>", b"\xff"])
def test_a_listing_that_is_garbage_is_an_error(s3: FaultyS3, bucket: Bucket, page: bytes) -> None:
    """An answer that cannot be parsed is an error, and the next listing works."""
    s3.fault = answering(200, page)
    assert isinstance(outcome_of(lambda: list(bucket.list_objects("v1"))), OSError)
    s3.fault = None
    assert len(list(bucket.list_objects("v1"))) == 1


def test_a_listing_without_end_is_cut_off(s3: FaultyS3) -> None:
    """A server that sends the same page for ever is left after the maximum of objects, or of time."""
    s3.fault = answering(200, listing_page([(STORED, 1)] * 1000, "again").encode())
    for limits in (attrs.evolve(LIMITS, max_listed=5000), attrs.evolve(LIMITS, listing_s=0.2)):
        bucket = open_bucket("s3://kv/some/prefix", limits)
        assert "not over after" in str(outcome_of(lambda bucket=bucket: list(bucket.list_objects("v1"))))


def test_a_listing_of_empty_pages_keeps_one_thread(s3: FaultyS3, hasty: Bucket) -> None:
    """A page that never comes ends its listing in time. Until its request ends, others fail at once; then they work."""
    s3.fault = answering(200, listing_page([], "again").encode())
    assert isinstance(outcome_of(lambda: list(hasty.list_objects("v1"))), TimeoutError)
    before = threading.active_count()
    for _ in range(5):
        assert isinstance(outcome_of(lambda: list(hasty.list_objects("v1"))), BlockingIOError)
    assert threading.active_count() == before
    s3.fault = None
    eventually(lambda: outcome_of(lambda: list(hasty.list_objects("v1"))) is None, "the listing works again")


def test_a_listing_that_nobody_reads_on_makes_way(s3: FaultyS3, bucket: Bucket) -> None:
    """If its reader stops in the middle, the next listing may begin."""
    s3.objects = {f"some/prefix/v1/x/{number:05}": b"" for number in range(600)}
    listing = bucket.list_objects("v1")
    assert len(next(listing)) == 256
    assert isinstance(outcome_of(lambda: list(bucket.list_objects("v1"))), BlockingIOError)
    listing.close()  # type: ignore[attr-defined]  # it is a generator
    eventually(lambda: outcome_of(lambda: list(bucket.list_objects("v1"))) is None, "the other listing works")


class PanicException(BaseException):
    """As a library in Rust raises it."""


class _Panicking:
    """A store of a library that panics, or is interrupted."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def get(self, *_: object, **__: object) -> Any:
        raise self._error

    put = list = get


def test_a_panic_in_the_library_is_an_error() -> None:
    """A panic, which is no Exception, becomes an OSError, and so does any error; an interrupt stays one."""
    for error in (PanicException("index out of bounds"), RuntimeError("x\n\nDebug source: y"), MemoryError()):
        bucket = Bucket(_Panicking(error), LIMITS)
        for call in (
            lambda b=bucket: b.get("x", 1),
            lambda b=bucket: b.put("x", b""),
            lambda b=bucket: list(b.list_objects("x")),
        ):
            assert type(outcome_of(call)) is OSError
    with pytest.raises(KeyboardInterrupt):
        Bucket(_Panicking(KeyboardInterrupt()), LIMITS).get("x", 1)


def test_other_threads_run_during_a_request(s3: FaultyS3, bucket: Bucket) -> None:
    """Twenty requests wait at the same time, and keep nobody else from running."""
    together = threading.Barrier(21)

    def wait_for_all(request: S3Request) -> bool:
        together.wait(30)
        return False

    s3.fault = wait_for_all
    results: list[bytes | None] = []
    threads = [threading.Thread(target=lambda: results.append(bucket.get(PATH, len(CONTENT)))) for _ in range(20)]
    for thread in threads:
        thread.start()
    together.wait(30)
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 20
