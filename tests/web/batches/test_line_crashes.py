"""Lines whose attempts raise what nobody foresaw: a bug, or a lack of memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypercorn.typing import ASGIFramework
from structlog.testing import capture_logs

from quipu.web.batches import line_runner
from quipu.web.batches.batch_service import BatchService
from quipu.web.batches.result_lines import result_of
from tests.web.batches.batch_bench import Bench, batch_server, billed, jsonl, line

SECRET = "what a client sent"


class CrashingService(BatchService):
    """The application raises for the second line of each batch."""

    @asynccontextmanager
    async def serving(self, app: ASGIFramework) -> AsyncIterator[None]:
        async def crash(scope: Any, receive: Any, send: Any) -> None:
            if any(name == b"x-request-id" and value.endswith(b"#2") for name, value in scope["headers"]):
                raise RuntimeError(SECRET)
            await app(scope, receive, send)

        async with super().serving(crash):
            yield


async def statuses_of(bench: Bench) -> list[int]:
    """Run a batch, and return the statuses of its lines in order."""
    done = await bench.ended((await bench.start(jsonl([line(n) for n in range(4)])))["id"])
    results = sorted(await bench.results(done), key=lambda result: str(result["custom_id"]))
    return [result["response"]["status_code"] for result in results]


def crashes_of(logged: Any, event: str) -> list[str]:
    """Return the types of the errors that were logged, with where they came from and without what they say."""
    found = [entry for entry in logged if entry["event"] == event]
    assert all(entry["frames"] for entry in found) and SECRET not in str(found)
    return [entry["error_type"] for entry in found]


async def test_application_crashes(tmp_path: Path) -> None:
    """A line for which the application raises fails after some attempts; the others of its batch, and later batches,
    are run."""
    with capture_logs() as logged:
        async with batch_server(tmp_path, make_service=CrashingService) as bench:
            assert await statuses_of(bench) == [200, 500, 200, 200]
            assert await statuses_of(bench) == [200, 500, 200, 200]
            assert len(billed(bench.journal)) == 6
    assert crashes_of(logged, "batch.line_crashed") == ["RuntimeError"] * 2 * line_runner.MAX_ATTEMPTS


async def test_no_memory_for_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line whose result cannot be made is an error of the server, and has a record; the others are run."""
    make, failures = result_of, [MemoryError(SECRET)]

    def make_later(*values: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return make(*values, **more)

    monkeypatch.setattr(line_runner, "result_of", make_later)
    with capture_logs() as logged:
        async with batch_server(tmp_path) as bench:
            assert sorted(await statuses_of(bench)) == [200, 200, 200, 500]
            assert len(bench.journal.closed) == 4 and not bench.journal.open
    assert crashes_of(logged, "batch.answer_crashed") == ["MemoryError"]
