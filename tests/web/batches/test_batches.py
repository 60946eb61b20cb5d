"""Batches in OpenAI's shapes: validation, running, results, counts, cancelling and expiry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.actors.messages.counts import Known
from quipu.kernels.fake import Dials
from quipu.web.batches.batch_values import BatchLimits
from tests.web.batches.batch_bench import COMPLETIONS, batch_server, billed, jsonl, line

LINES = [line(number) for number in range(5)]


async def test_each_line_has_one_result_and_one_record(tmp_path: Path) -> None:
    """A batch runs each line once: its answer is the endpoint's, and counts and usage are those of the records."""
    async with batch_server(tmp_path) as bench:
        batch = await bench.start(jsonl(LINES), metadata={"job": "knots"})
        assert batch["status"] == "validating" and batch["metadata"] == {"job": "knots"}
        done = await bench.ended(batch["id"])
        results = await bench.results(done)
        records = billed(bench.journal)
    assert done["status"] == "completed" and done["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert done["model"] == "demo" and done["error_file_id"] is None
    assert sorted(result["custom_id"] for result in results) == [f"line-{number}" for number in range(5)]
    for result in results:
        assert result["error"] is None and result["response"]["status_code"] == 200
        assert result["response"]["body"]["object"] == "text_completion"
    assert {result["response"]["request_id"] for result in results} == {record.request_id for record in records}
    assert {record.batch_id for record in records} == {batch["id"]} and len(records) == 5
    prompt = [record.prompt.n for record in records if isinstance(record.prompt, Known)]
    usage = done["usage"]
    assert usage["input_tokens"] == sum(prompt) and usage["output_tokens"] == 20 and usage["total_tokens"] == 35


async def test_bad_body_is_an_error_line(tmp_path: Path) -> None:
    """What the endpoint refuses is an error of that line alone, with its status and body, in the error file."""
    async with batch_server(tmp_path) as bench:
        bad = [line(7, model="none"), line(8, temperature=-1), line(9, stream=True)]
        done = await bench.ended((await bench.start(jsonl([*bad, line(1)])))["id"])
        output = (await bench.content(done["output_file_id"])).splitlines()
        errors = [json.loads(one) for one in (await bench.content(done["error_file_id"])).splitlines()]
    assert done["status"] == "completed" and done["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    assert len(output) == 1
    assert [error["response"]["status_code"] for error in errors] == [404, 400, 400]
    assert [error["response"]["body"]["error"]["param"] for error in errors] == ["model", "temperature", "stream"]
    assert [error["custom_id"] for error in errors] == ["line-7", "line-8", "line-9"]


async def test_results_split_at_any_line_break(tmp_path: Path) -> None:
    """A result is one line, also for a client that splits text at the line breaks of Unicode, in ids and in answers."""
    name = "a\u2028b\u2029c\x85d"
    async with batch_server(tmp_path) as bench:
        lines = [
            {**line(1, prompt=name, echo=True), "custom_id": name},
            {**line(2, model="none"), "custom_id": "é" + name},
        ]
        done = await bench.ended((await bench.start(jsonl(lines)))["id"])
        (output,) = (await bench.content(done["output_file_id"])).decode().splitlines()
        (error,) = (await bench.content(done["error_file_id"])).decode().splitlines()
    result = json.loads(output)
    assert result["custom_id"] == name and result["response"]["body"]["choices"][0]["text"].startswith(name)
    assert json.loads(error)["custom_id"] == "é" + name


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (b"{}\n", "missing_required_parameter", 1),
        (jsonl(LINES) + b"no json\n", "invalid_json_line", 6),
        (jsonl([line(1), line(1)]), "duplicate_custom_id", 2),
        (jsonl([line(1), line(2) | {"method": "GET"}]), "invalid_method", 2),
        (jsonl([line(1, url="/v1/chat/completions")]), "mismatched_url", 1),
        (jsonl([line(1) | {"body": "text"}]), "invalid_type", 1),
        (jsonl([line(1) | {"custom_id": 5}]), "invalid_type", 1),
        (jsonl([line(1) | {"custom_id": ""}]), "invalid_custom_id", 1),
        (jsonl([line(number) for number in range(9)]), "too_many_lines", 9),
        (b'{"custom_id": "' + b"x" * 40_000, "line_too_long", 1),
        (b"[" * 20_000, "invalid_json_line", 1),
        (b"\n\n", "empty_file", None),
    ],
)
async def test_bad_file_fails_its_batch(tmp_path: Path, data: bytes, code: str, number: int | None) -> None:
    """A file that breaks a rule is not run at all: the batch fails and names each line that breaks one."""
    async with batch_server(tmp_path, limits=BatchLimits(max_lines=8, max_line_bytes=16 << 10)) as bench:
        done = await bench.ended((await bench.start(data))["id"])
        assert done["status"] == "failed" and done["failed_at"] is not None and done["output_file_id"] is None
        assert [(error["code"], error["line"]) for error in done["errors"]["data"]] == [(code, number)]
        assert not bench.journal.closed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
    ],
)
async def test_bad_batch_is_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    """An invalid field of a new batch is a 400 that names it."""
    async with batch_server(tmp_path) as bench:
        _, file = await bench.upload(jsonl(LINES))
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
        status, answer = await bench.request("POST", "/v1/batches", body)
        assert status == 400 and answer["error"]["param"] == param, answer
        status, answer = await bench.request("POST", "/v1/batches", {**body, **GOOD, "input_file_id": "file-none"})
        assert status == 404 and answer["error"]["param"] == "id"


GOOD = {"endpoint": COMPLETIONS, "completion_window": "24h", "metadata": None, "output_expires_after": None}


async def test_cancelled_batch_keeps_what_has_run(tmp_path: Path) -> None:
    """After a cancel no line is begun; those that ran have their results, and the others say that they were not run."""
    gate = Dials(step_seconds=0.02)
    async with batch_server(tmp_path, limits=BatchLimits(concurrency=1), dials=gate) as bench:
        batch = await bench.start(jsonl([line(number, max_tokens=8) for number in range(40)]))
        with trio.fail_after(60):
            while (await bench.batch(batch["id"]))["request_counts"]["completed"] < 2:
                await trio.sleep(0.01)
        status, cancelling = await bench.request("POST", f"/v1/batches/{batch['id']}/cancel")
        assert status == 200 and cancelling["status"] in ("cancelling", "finalizing", "cancelled")
        done = await bench.ended(batch["id"])
        results = await bench.results(done)
        counts = done["request_counts"]
        assert done["status"] == "cancelled" and done["cancelled_at"] is not None
        assert counts["completed"] + counts["failed"] == 40 and 2 <= counts["completed"] < 40
        assert sorted(r["custom_id"] for r in results) == sorted(f"line-{number}" for number in range(40))
        cancelled = [result for result in results if result["response"] is None]
        assert {result["error"]["code"] for result in cancelled} == {"batch_cancelled"}
        assert len(billed(bench.journal)) == counts["completed"] == 40 - len(cancelled)


async def test_expired_batch_says_so_for_each_line(tmp_path: Path) -> None:
    """A batch whose window is over ends as expired; lines that were not run have the error `batch_expired`."""
    dials = Dials(step_seconds=0.02)
    async with batch_server(tmp_path, limits=BatchLimits(concurrency=1), dials=dials) as bench:
        batch = await bench.start(jsonl([line(n, max_tokens=8) for n in range(40)]), completion_window="1h")
        with trio.fail_after(60):
            while not (await bench.batch(batch["id"]))["request_counts"]["completed"]:
                await trio.sleep(0.01)
        bench.clock.now += 3601
        done = await bench.ended(batch["id"])
        results = await bench.results(done)
    assert done["status"] == "expired" and done["expired_at"] is not None
    errors = [result["error"]["code"] for result in results if result["error"] is not None]
    assert set(errors) == {"batch_expired"} and len(errors) == done["request_counts"]["failed"]
    assert len(results) == 40


async def test_batches_are_listed_page_by_page(tmp_path: Path) -> None:
    """A list has the newest first, `after` continues it, and `has_more` says whether there are others."""
    async with batch_server(tmp_path) as bench:
        ids = [(await bench.start(jsonl([line(number)])))["id"] for number in range(3)]
        for batch_id in ids:
            await bench.ended(batch_id)
        _, first = await bench.request("GET", "/v1/batches?limit=2")
        _, rest = await bench.request("GET", f"/v1/batches?limit=2&after={first['last_id']}")
        unknown, refused = await bench.request("GET", "/v1/batches?after=batch_other")
    assert [batch["id"] for batch in first["data"]] == ids[:0:-1] and first["has_more"] is True
    assert [batch["id"] for batch in rest["data"]] == ids[:1] and rest["has_more"] is False
    assert (unknown, refused["error"]["param"]) == (400, "after"), "no empty page: a client would take it for the end"


async def test_open_batches_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    """A tenant with as many open batches as allowed gets a 429 for another one."""
    limits = BatchLimits(max_open_batches=1, concurrency=1)
    async with batch_server(tmp_path, limits=limits, dials=Dials(step_seconds=0.05)) as bench:
        batch = await bench.start(jsonl([line(number, max_tokens=8) for number in range(20)]))
        body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        status, answer = await bench.request("POST", "/v1/batches", body)
        assert status == 429 and answer["error"]["code"] == "too_many_batches"
        await bench.request("POST", f"/v1/batches/{batch['id']}/cancel")
        await bench.ended(batch["id"])
        status, answer = await bench.request("POST", "/v1/batches", body)
        assert status == 200
