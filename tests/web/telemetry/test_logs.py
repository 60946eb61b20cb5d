"""What is logged about a request, and what never is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import trio.testing
from structlog.testing import capture_logs

from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import ErrorKind, Outcome, RequestError
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.api.openai.test_openai_bad_input import CASES
from tests.web.api.openai.test_openai_bad_input import body as with_fields
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, failure, hello, record, scripted

PATH = "/v1/completions"
MARK = "xyzzy"
BODY: dict[str, Any] = {"model": "tiny", "prompt": MARK}


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    """Return everything that is logged, at any level."""
    with capture_logs() as lines:
        yield lines


async def test_one_line_a_request(lines: list[Any]) -> None:
    """A served request writes one line at info level with both ids and the numbers of its record."""
    await Client(make_app(FakeDesk())).post(PATH, BODY, {"x-request-id": "mine"})
    (line,) = lines
    assert line.pop("duration_s") >= 0
    assert line == {
        "event": "request.done",
        "log_level": "info",
        "request_id": "r1",
        "client_request_id": "mine",
        "endpoint": PATH,
        "status": 200,
        "outcome": "finished",
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "completion_tokens": 3,
        "miss_reason": None,
        "miss_token": None,
        "engine": None,
    }


async def test_line_names_the_miss_of_the_first_prompt(lines: list[Any]) -> None:
    """The closing line says why and where the cached prefix of the first prompt ended, as the record does."""
    misses = (CacheMiss(MissReason.OTHER_DOMAIN, 0), CacheMiss(MissReason.EVICTED, 16))
    await Client(make_app(FakeDesk(scripted(STARTED, Closed(record(cache_misses=misses), None))))).post(PATH, BODY)
    (line,) = lines
    assert (line["miss_reason"], line["miss_token"]) == ("other_domain", 0)


async def test_refused_request(lines: list[Any]) -> None:
    """The line of a refused request has the field, but not its value; its tokens are unknown."""
    await Client(make_app(FakeDesk())).post(PATH, {**BODY, "temperature": MARK})
    (line,) = lines
    assert (line["outcome"], line["status"]) == ("rejected", 400)
    assert (line["error_param"], line["error_code"]) == ("temperature", "invalid_type")
    assert line["prompt_tokens"] is None and line["cached_tokens"] is None


async def test_cancelled_request(lines: list[Any]) -> None:
    """A client that disconnects gets a line as well, with what it had received."""
    desk = FakeDesk(scripted(STARTED, Delta(0, MARK, 1, None)))
    async with Client(make_app(desk)).open("POST", PATH, {**BODY, "stream": True}) as exchange:
        await trio.testing.wait_all_tasks_blocked()
        exchange.leave()
        await trio.testing.wait_all_tasks_blocked()
        (line,) = lines
    assert (line["outcome"], line["status"]) == ("cancelled", 200)
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (40, 32, 1)


async def test_cancelled_before_response(lines: list[Any]) -> None:
    """A client that disconnects before the status line has no status in the log."""
    desk = FakeDesk(scripted())
    async with Client(make_app(desk)).open("POST", PATH, BODY) as exchange:
        await trio.testing.wait_all_tasks_blocked()
        exchange.leave()
        await trio.testing.wait_all_tasks_blocked()
        (line,) = lines
    assert (line["outcome"], line["status"], line["prompt_tokens"]) == ("cancelled", None, None)


async def test_overflow_is_named(lines: list[Any]) -> None:
    """A client that was cut off because it did not read is distinguished from one that disconnected."""
    desk = FakeDesk(scripted(STARTED, *[Delta(0, "x" * 500, 1, None)] * 3))
    async with Client(make_app(desk, AppOptions(sink_limit_bytes=100))).open("POST", PATH, {**BODY, "stream": True}):
        await trio.testing.wait_all_tasks_blocked()
        (line,) = lines
    assert line["outcome"] == "cancelled" and line["sink_overflowed"] is True


async def test_crash_is_logged_once_without_its_message(lines: list[Any]) -> None:
    """A bug is logged with its type and frames under the request's id, without its message, which may quote a
    prompt."""
    await Client(make_app(FakeDesk(start_error=ValueError(MARK)))).post(PATH, BODY)
    crash, done = lines
    assert crash["event"] == "request.crashed" and crash["log_level"] == "error"
    assert crash["error_type"] == "ValueError" and any("fakes.py" in frame for frame in crash["frames"])
    assert crash["request_id"] == done["request_id"] == "r1"
    assert done["outcome"] == "failed"


async def test_probes_are_quiet(lines: list[Any]) -> None:
    """Probes and scrapes log nothing at info level."""
    client = Client(make_app(FakeDesk()))
    for path in ("/health", "/ready", "/v1/models", "/nothing"):
        await client.get(path)
    assert {line["log_level"] for line in lines} == {"debug"}


def with_marker(value: Any) -> Any:
    """Return the same JSON with the marker in every string."""
    match value:
        case str():
            return value if value in ("user", "assistant", "tiny", "text", "function") else value + MARK
        case list():
            return [with_marker(item) for item in value]
        case dict():
            return {key: with_marker(item) for key, item in value.items()}
        case _:
            return value


async def test_nothing_of_a_prompt_is_logged(
    lines: list[Any], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a request contains and however it ends, no log at any level quotes it."""
    caplog.set_level(0)
    broken = RequestError(ErrorKind.INTERNAL, "broken")
    scripts = [
        scripted(*hello()),
        scripted(STARTED, Delta(0, MARK, 1, None), Closed(record(), None)),
        scripted(STARTED, Delta(0, MARK, 1, None), Closed(record(outcome=Outcome.FAILED), broken)),
        scripted(failure(ErrorKind.INVALID, MARK)),
        scripted(STARTED, Delta(0, MARK + "\ud800", 1, None), Closed(record(), None)),
    ]
    for script in scripts:
        for stream in (False, True):
            client = Client(make_app(FakeDesk(script)))
            async with client.open("POST", PATH, {**BODY, "stream": stream}) as exchange:
                await exchange.wait_started()
                await exchange.read()
    client = Client(make_app(FakeDesk()))
    for path, fields, _, _ in CASES:
        request = with_marker(with_fields(path, **fields))
        async with client.open("POST", path, {**request, "prompt": with_marker(request.get("prompt", ""))}) as exchange:
            await exchange.wait_started()
            await exchange.read()
    for data in (b'{"prompt": "xyzzy', b'"xyzzy"', b'{"model": "xyzzy"}'):
        await client.post(PATH, data)
    await client.post("/v1/" + MARK, BODY)
    await client.get("/v1/models/" + MARK)
    await Client(make_app(FakeDesk(start_error=ValueError(MARK)))).post(PATH, BODY)

    assert len(lines) > len(CASES)
    assert MARK not in repr(lines)
    captured = capfd.readouterr()
    assert MARK not in captured.out + captured.err + caplog.text


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("mine-1", "mine-1"), ("a b", "a b"), ("x" * 257, "r1"), ("é", "r1"), ("a\tb", "r1"), ("", "r1"), (None, "r1")],
)
async def test_client_ids(lines: list[Any], sent: str | None, echoed: str) -> None:
    """A valid client id is echoed, an invalid one is ignored; the server's own is always present."""
    headers = {} if sent is None else {"x-request-id": sent}
    exchange, _ = await Client(make_app(FakeDesk())).post(PATH, BODY, headers)
    assert exchange.headers["x-request-id"] == echoed
    assert exchange.headers["x-quipu-request-id"] == "r1"
    assert ("client_request_id" in lines[0]) == (echoed != "r1")


async def test_errors_have_ids() -> None:
    """Refused and unrouted requests have ids as well."""
    client = Client(make_app(FakeDesk()))
    for path in (PATH, "/nothing"):
        exchange, _ = await client.post(path, b"{", {"x-request-id": "mine"})
        assert exchange.headers["x-request-id"] == "mine" and exchange.headers["x-quipu-request-id"].startswith("r")


def test_configured_lines_are_json() -> None:
    """If stderr is not a terminal, each line is one JSON object, from the given level upwards."""
    program = (
        "import structlog; from quipu.web.telemetry.logs import configure; configure('info');"
        "log = structlog.get_logger().bind(request_id='r1'); log.debug('no'); log.info('yes', n=1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    (line,) = done.stderr.splitlines()
    entry = json.loads(line)
    assert done.stdout == b""
    assert (entry["event"], entry["level"], entry["request_id"], entry["n"]) == ("yes", "info", "r1", 1)
    assert "timestamp" in entry


def test_unknown_level() -> None:
    """An unknown level is refused at startup."""
    from quipu.web.telemetry.logs import configure

    with pytest.raises(ValueError, match="unknown log level"):
        configure("loud")
