"""Files and batches when the disk refuses for a while, and when files go while somebody begins to use them: nothing
ends the server, and nothing is left of what failed."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.web.batches.batch_values import Batch, BatchLimits
from tests.runtimes import eventually
from tests.web.batches.batch_bench import COMPLETIONS, Bench, batch_server, billed, jsonl, line
from tests.web.batches.test_files import SECRET, secret_lines, traces_of


def fail_sometimes(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, num_failures: int = 2) -> list[int]:
    """Have the first calls of a method raise for want of descriptors; return how many are left to fail."""
    call, failures = getattr(owner, name), [num_failures]

    def refuse(*arguments: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return call(*arguments)

    monkeypatch.setattr(owner, name, refuse)
    return failures


async def run_batch(bench: Bench) -> Any:
    return await bench.ended((await bench.start(jsonl([line(n) for n in range(6)])))["id"])


async def test_file_is_not_found_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input file that cannot be opened or read for a moment is checked, and its lines are run, later."""
    async with batch_server(tmp_path) as bench:
        failures = fail_sometimes(monkeypatch, bench.service.store.folder, "open", 5)
        done = await run_batch(bench)
        assert done["request_counts"] == {"total": 6, "completed": 6, "failed": 0} and failures == [0]
        assert len(billed(bench.journal)) == 6


async def test_line_cannot_be_read_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines whose file cannot be read for a moment are run later."""
    async with batch_server(tmp_path) as bench:
        failures = fail_sometimes(monkeypatch, bench.service.store.folder, "read", 8)
        done = await run_batch(bench)
        assert done["request_counts"]["completed"] == 6 and failures == [0]


@pytest.mark.parametrize("is_gone", [True, False])
async def test_file_changes_under_its_batch(tmp_path: Path, is_gone: bool) -> None:
    """Lines that are gone from the disk, or no longer what they were, are errors of the server; other batches run."""
    async with batch_server(tmp_path, limits=BatchLimits(concurrency=1)) as bench:
        batch = await bench.start(jsonl([line(n) for n in range(30)]))
        path = tmp_path / "files" / batch["input_file_id"]
        with trio.fail_after(30):
            while not (await bench.batch(batch["id"]))["request_counts"]["completed"]:
                await trio.lowlevel.checkpoint()
        if is_gone:
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))
        done = await bench.ended(batch["id"])
        counts = done["request_counts"]
        assert counts["failed"] and counts["completed"] + counts["failed"] == 30
        errors = [one for one in await bench.results(done) if one["response"]["status_code"] != 200]
        assert {one["response"]["status_code"] for one in errors} == {500}
        assert (await run_batch(bench))["request_counts"]["completed"] == 6


async def test_results_are_kept_despite_a_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends although the folder could not be opened once, after a file of results had got its name."""
    async with batch_server(tmp_path) as bench:
        batch = await bench.start(jsonl([line(n) for n in range(6)]))
        failures = fail_sometimes(monkeypatch, bench.service.store.folder, "_sync", 3)
        done = await bench.ended(batch["id"])
        assert len(await bench.results(done)) == 6 and failures == [0]


@pytest.mark.parametrize("point", ["folder", "database"])
async def test_nothing_is_left_of_a_failed_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """A file that cannot be stored in the end is a 503, and nothing of it is left."""

    def fail(*_: Any) -> None:
        if point == "folder":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise sqlite3.OperationalError("database or disk is full")

    async with batch_server(tmp_path) as bench:
        store = bench.service.store
        with monkeypatch.context() as patched:
            if point == "folder":
                fail_sometimes(patched, store.folder, "_sync", 1)
            else:
                patched.setattr(store, "_insert_file", fail)
            status, answer = await bench.upload(secret_lines())
        assert status == 503 and answer["error"]["code"] == "storage_unavailable", answer
        assert not traces_of(tmp_path, SECRET) and not list((tmp_path / "files").iterdir())


async def test_file_is_deleted_while_a_batch_begins(tmp_path: Path) -> None:
    """A file is deleted, or a batch reads it, but not both, whatever order their steps have."""
    async with batch_server(tmp_path) as bench:
        for delay in range(12):
            _, file = await bench.upload(jsonl([line(n) for n in range(3)]))
            body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
            statuses: dict[str, int] = {}
            batches: list[Any] = []

            async def delete(file_id: str, delay: int, statuses: dict[str, int]) -> None:
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                statuses["delete"], _ = await bench.request("DELETE", f"/v1/files/{file_id}")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(delete, file["id"], delay, statuses)
                statuses["create"], answer = await bench.request("POST", "/v1/batches", body)
                batches.append(answer)
            if statuses["create"] == 200:
                done = await bench.ended(batches[0]["id"])
                assert (statuses["delete"], done["status"]) == (400, "completed"), delay
            else:
                assert statuses == {"create": 404, "delete": 200}, delay


@pytest.mark.parametrize("why", ["refused", "left"])
async def test_nothing_is_left_of_a_message_batch_that_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A batch of messages that cannot be stored, or whose client leaves just before, leaves no file behind."""
    params = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": SECRET}]}
    body = {"requests": [{"custom_id": "one", "params": params}]}

    async def fail(_: Batch) -> None:
        if why == "left":
            await trio.sleep_forever()
        raise sqlite3.OperationalError("database or disk is full")

    async with batch_server(tmp_path) as bench:
        monkeypatch.setattr(bench.service, "add", fail)
        with trio.move_on_after(1.0 if why == "left" else 30.0) as waiting:
            status, _ = await bench.request("POST", "/v1/messages/batches", body)
            assert status >= 500
        assert waiting.cancelled_caught is (why == "left")
        await eventually(lambda: not list((tmp_path / "files").iterdir()), "its file is gone")
        assert not traces_of(tmp_path, SECRET)


async def test_uploads_at_once_stay_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's uploads that run at once have no more room together than those that follow each other."""
    data = jsonl([line(n) for n in range(20)])
    async with batch_server(tmp_path, limits=BatchLimits(max_tenant_bytes=len(data) + 10)) as bench:
        new, begun, may_go_on = bench.service.store.folder.new, threading.Event(), threading.Event()

        def new_and_wait() -> Path:
            if not begun.is_set():
                begun.set()
                may_go_on.wait(30)
            return new()

        monkeypatch.setattr(bench.service.store.folder, "new", new_and_wait)
        statuses: list[int] = []

        async def upload() -> None:
            statuses.append((await bench.upload(data))[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload)
            await eventually(begun.is_set, "an upload has begun")
            await upload()
            may_go_on.set()
        assert statuses == [200, 400]
        assert bench.service.store.use_of("default").num_files == 1
