"""What clients of files and batches are told while the database fails, and what holds afterwards."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.kernels.fake import Dials
from quipu.web.batches.batch_refusals import storage_failed
from quipu.web.batches.batch_values import Api, Batch, BatchLimits, Status
from tests.web.batches.batch_bench import COMPLETIONS, Bench, batch_server, jsonl, line


def refuse(*_: Any) -> Any:
    raise sqlite3.OperationalError("database is locked")


async def assert_unavailable(bench: Bench, method: str, path: str, body: object = b"") -> None:
    status, answer = await bench.request(method, path, body)
    assert (status, answer["error"]["code"]) == (503, "storage_unavailable"), answer
    assert "locked" not in answer["error"]["message"]


async def test_database_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a client asks for is a 503 while the database fails, and is there again afterwards."""
    async with batch_server(tmp_path) as bench:
        done = await bench.ended((await bench.start(jsonl([line(n) for n in range(2)])))["id"])
        file, batch = f"/v1/files/{done['input_file_id']}", f"/v1/batches/{done['id']}"
        created = {"input_file_id": done["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        for name, method, path, body in (
            ("use_of", "POST", "/v1/batches", created),
            ("add_batch", "POST", "/v1/batches", created),
            ("batches", "GET", "/v1/batches", b""),
            ("batch", "GET", batch, b""),
            ("batch", "POST", f"{batch}/cancel", b""),
            ("files", "GET", "/v1/files", b""),
            ("file", "GET", file, b""),
            ("file", "GET", f"{file}/content", b""),
            ("delete_unless_needed", "DELETE", file, b""),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(bench.service.store, name, refuse)
                await assert_unavailable(bench, method, path, body)
        with monkeypatch.context() as patched:
            patched.setattr(bench.service.store, "use_of", refuse)
            status, answer = await bench.upload(jsonl([line(1)]))
            assert (status, answer["error"]["code"]) == (503, "storage_unavailable"), answer
        assert await bench.batch(done["id"]) == done
        assert len((await bench.request("GET", "/v1/batches"))[1]["data"]) == 1, "none was created"


async def test_cancel_that_cannot_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel that cannot be stored is a 503, and is stored when it is asked for again."""

    def stored() -> Batch | None:
        return bench.service.store.batch("default", Api.OPENAI, batch["id"])

    dials = Dials(step_seconds=0.05)
    async with batch_server(tmp_path, limits=BatchLimits(concurrency=1), dials=dials) as bench:
        batch = await bench.start(jsonl([line(n, max_tokens=200) for n in range(3)]))
        with trio.fail_after(60):
            while (await bench.batch(batch["id"]))["status"] != "in_progress":
                await trio.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(bench.service.store, "save", refuse)
            await assert_unavailable(bench, "POST", f"/v1/batches/{batch['id']}/cancel")
        before = await bench.service.call(stored)
        assert before is not None and before.status is Status.IN_PROGRESS
        status, cancelling = await bench.request("POST", f"/v1/batches/{batch['id']}/cancel")
        assert (status, cancelling["status"]) == (200, "cancelling")
        after = await bench.service.call(stored)
        assert after is not None and after.status is Status.CANCELLING


async def test_batches_at_once_stay_within_the_bound(tmp_path: Path) -> None:
    """A tenant gets no more open batches by requests that run at once."""
    limits = BatchLimits(max_open_batches=2)
    async with batch_server(tmp_path, limits=limits, dials=Dials(step_seconds=0.05)) as bench:
        _, file = await bench.upload(jsonl([line(n, max_tokens=200) for n in range(4)]))
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        statuses: list[int] = []

        async def create() -> None:
            statuses.append((await bench.request("POST", "/v1/batches", body))[0])

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(create)
        assert sorted(statuses) == [200, 200, 429, 429, 429, 429]


async def test_files_at_once_stay_within_the_bound(tmp_path: Path) -> None:
    """A tenant gets no more files by uploads that run at once."""
    async with batch_server(tmp_path, limits=BatchLimits(max_files=2)) as bench:
        statuses: list[int] = []

        async def upload() -> None:
            statuses.append((await bench.upload(jsonl([line(1)])))[0])

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(upload)
        assert sorted(statuses) == [200, 200, 400, 400, 400, 400]


def full_database() -> sqlite3.Error:
    """Return the error of a database that is full."""
    connection = sqlite3.connect(":memory:")
    connection.execute("pragma max_page_count=2")
    with pytest.raises(sqlite3.OperationalError) as refused:
        connection.execute("create table a as select zeroblob(1000000)")
    connection.close()
    return refused.value


def test_room_is_named() -> None:
    """A client is told of a lack of room only where there is one."""
    full = [OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EDQUOT)]
    for error in (*full, full_database()):
        assert "no room" in storage_failed(error).message
    for error in (OSError(errno.EIO, os.strerror(errno.EIO)), sqlite3.DatabaseError("malformed")):
        assert "no room" not in storage_failed(error).message
