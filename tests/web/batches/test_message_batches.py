"""Batches in Anthropic's shape: how their requests are read from a body that is never in memory as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.web.api.anthropic import batch_requests
from quipu.web.batches.batch_values import BatchLimits
from tests.web.batches.batch_bench import Bench, batch_server

PATH = "/v1/messages/batches"
PARAMS = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": 'Which\nknots, [ or } or \\"?'}]}


def request_of(custom_id: str, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": {**PARAMS, **fields}}


async def results_of(bench: Bench, batch: Any) -> dict[str, Any]:
    """Wait for the end of a batch, and return its results by id."""
    with trio.fail_after(60):
        while batch["processing_status"] != "ended":
            await trio.sleep(0.01)
            _, batch = await bench.request("GET", f"{PATH}/{batch['id']}")
    async with bench.http.open("GET", f"{PATH}/{batch['id']}/results") as exchange:
        assert await exchange.wait_started() == 200
        lines = (await exchange.read()).splitlines()
    return {one["custom_id"]: one["result"] for one in map(json.loads, lines)}


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 18])
@pytest.mark.parametrize("indent", [None, 1])
async def test_requests_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, indent: int | None
) -> None:
    """Each request is run, however the body is written and in whatever pieces it is read."""
    monkeypatch.setattr(batch_requests, "PIECE_BYTES", piece_bytes)
    requests = [request_of(f"r-{n}", system=f"{{{n}") for n in range(3)] + [request_of("bad", model="none")]
    body = {"other": {"requests": [1, [2]]}, "a": [3], "requests": requests, "b": [{}]}
    async with batch_server(tmp_path) as bench:
        async with bench.http.open("POST", PATH, json.dumps(body, indent=indent).encode()) as exchange:
            created = await exchange.json()
            assert exchange.headers["x-quipu-ignored-fields"] == "other,a,b"
        assert created["request_counts"]["processing"] == 4
        results = await results_of(bench, created)
    assert {name: result["type"] for name, result in results.items()} == {
        **{f"r-{n}": "succeeded" for n in range(3)},
        "bad": "errored",
    }


def nested(depth: int) -> bytes:
    return b'{"requests":[{"custom_id":"a","params":{"x":' + b"[" * depth + b"]" * depth + b"}}]}"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (nested(300), 200),
        (b'{"requests":[{"custom_id":"a","params":{"x":"\\ud800"}}]}', 400),
        (nested(100_000), 400),
        (b"", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b'{"requests":{}}', 400),
        (b'{"requests":[]}', 400),
        (b'{"requests":[ ]}', 400),
        (b'{"\\u0072equests":[{"custom_id":"a","params":{}}]}', 400),
        (b'{"requests":[{"custom_id":"a","params":{}}', 400),
        (b'{"requests":[{"custom_id":"a","params":{}}}', 400),
        (b'{"requests":[{"custom_id":"a","params":{}},]}', 400),
        (b'{"requests":[,{"custom_id":"a","params":{}}]}', 400),
        (b'{"requests":[{"custom_id":"a","params":{}} 1]}', 400),
        (b'{"requests":[{"custom_id":"a","params":{}}]} 1', 400),
        (b'{"requests":[{"custom_id":"a","params":{"a]}}]}', 400),
        (b'{"requests":[{"custom_id":"a","params":{}}]}\xff', 400),
        (b'{"x":"' + b"y" * 20_000 + b'","requests":[]}', 400),
        (b'{"a":[]' + b',"a":[]' * 40_000 + b"}", 400),
        (b'{"requests":[' + b"," * 100_000 + b"]}", 400),
    ],
    ids=range(21),
)
async def test_what_is_a_body(tmp_path: Path, body: bytes, status: int) -> None:
    """Only an object with one list of requests makes a batch, of which nothing is left otherwise."""
    async with batch_server(tmp_path) as bench:
        answered, answer = await bench.request("POST", PATH, body)
        assert answered == status, answer
        if status == 200:
            assert set(await results_of(bench, answer)) == {"a"}
        else:
            assert answer["type"] == "error" and not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([request_of("a"), 5], "requests[1]"),
        ([request_of("a"), request_of("a")], "requests[1].custom_id"),
        ([{"params": {}}], "requests[0].custom_id"),
        ([{"custom_id": 5, "params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a b", "params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a"}], "requests[0].params"),
        ([{"custom_id": "a", "params": []}], "requests[0].params"),
        ([request_of("a", stream=True)], "requests[0].params.stream"),
        ([request_of("a", system="x" * 80_000)], "requests[0]"),
        ([request_of(str(n)) for n in range(9)], "`requests`"),
    ],
)
async def test_bad_request_is_named(tmp_path: Path, requests: list[Any], param: str) -> None:
    """A request that breaks a rule is named in the error, and no batch is made."""
    limits = BatchLimits(max_lines=8, max_line_bytes=32 << 10)
    async with batch_server(tmp_path, limits=limits) as bench:
        status, answer = await bench.request("POST", PATH, {"requests": requests})
        assert status == 400 and param in answer["error"]["message"], answer
        assert not list((tmp_path / "files").iterdir())


async def test_body_may_be_as_large_as_a_file(tmp_path: Path) -> None:
    """A body beyond `--max-body-bytes` is accepted up to `--max-batch-file-bytes`; what it holds in memory is small."""
    requests = [request_of(str(n), model="none", system="x" * 500_000) for n in range(24)]
    async with batch_server(tmp_path, limits=BatchLimits(max_file_bytes=13 << 20)) as bench:
        status, batch = await bench.request("POST", PATH, {"requests": requests})
        assert status == 200 and batch["request_counts"]["processing"] == 24
        assert len(await results_of(bench, batch)) == 24
        status, answer = await bench.request(
            "POST", PATH, {"requests": [*requests, request_of("y", system="x" * 3_000_000)]}
        )
        assert status == 413 and answer["error"]["message"].startswith(
            "The batch is too large: this server takes up to"
        )
        assert "--max-batch-file-bytes" in answer["error"]["message"]


async def test_bounds_name_batches(tmp_path: Path) -> None:
    """A tenant that has too much or too many is told of its batches: this API has no files."""
    limits = BatchLimits(max_tenant_bytes=5_000, max_files=1)
    async with batch_server(tmp_path, limits=limits) as bench:
        status, answer = await bench.request("POST", PATH, {"requests": [request_of("a", system="x" * 5_000)]})
        assert status == 400 and "Your batches and results may have 5,000 bytes" in answer["error"]["message"]
        assert (await bench.request("POST", PATH, {"requests": [request_of("a")]}))[0] == 200
        status, answer = await bench.request("POST", PATH, {"requests": [request_of("a")]})
        assert status == 400 and "Delete some batches first" in answer["error"]["message"]


async def test_memory_is_counted(tmp_path: Path) -> None:
    """The request that is being read takes room of all bodies; without it the upload is a 529 and leaves nothing."""
    async with batch_server(tmp_path) as bench:
        bench.app.bodies.max_bytes = 100_000
        requests = [request_of("a", system="x" * 400_000)]
        status, answer = await bench.request("POST", PATH, {"requests": requests})
        assert status == 529, answer
        requests = [request_of(str(n), model="none", system="x" * 100_000) for n in range(9)]
        assert (await bench.request("POST", PATH, {"requests": requests}))[0] == 200
        assert not bench.app.bodies.num_bytes


class Counting:
    """A pattern that counts the bytes that it is given."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self.num_bytes = 0
        self._pattern = pattern

    def finditer(self, data: bytes) -> Iterator[re.Match[bytes]]:
        self.num_bytes += len(data)
        return self._pattern.finditer(data)


def test_brackets_before_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of requests is looked for once in each piece of a body, however many other lists come before it."""
    pattern = Counting(batch_requests.OPENS_REQUESTS)
    monkeypatch.setattr(batch_requests, "OPENS_REQUESTS", pattern)
    body = b'{"a":[]' + b',"a":[]' * 2_000 + b',"requests" : [{"custom_id":"a","params":{}}]}'
    cutter, lines = batch_requests.RequestCutter(BatchLimits()), b""
    for start in range(0, len(body), 8192):
        lines += cutter.feed(body[start : start + 8192])
    assert cutter.num_requests == 1 and lines.startswith(b'{"custom_id":"a"')
    assert pattern.num_bytes < 2 * len(body)


@pytest.mark.parametrize("query", ["after_id=other", "before_id=other", "after_id=x&before_id=y", "limit=0"])
async def test_bad_page_is_refused(tmp_path: Path, query: str) -> None:
    """A page that begins nowhere is an error: a client would take an empty one for the end of the list."""
    async with batch_server(tmp_path) as bench:
        status, answer = await bench.request("GET", f"{PATH}?{query}")
    param = "before_id" if "&" in query else query.partition("=")[0]
    assert status == 400 and param in answer["error"]["message"], answer
