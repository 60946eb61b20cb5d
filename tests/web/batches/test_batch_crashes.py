"""A server that is killed amid a batch: each line has one result and is billed once, wherever it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from quipu.actors.messages.outcomes import Fault
from quipu.kernels.fake import Dials
from quipu.web.batches.batch_service import BatchService
from quipu.web.batches.batch_values import Batch, BatchLimits, LineResult
from tests.journals import KeptJournal
from tests.runtimes import eventually, kill_engine
from tests.web.batches.batch_bench import Bench, batch_server, billed, jsonl, line, settled

LINES = [line(number, max_tokens=6) for number in range(12)]


async def finish_elsewhere(folder: Path, journal: KeptJournal, batch_id: str) -> list[Any]:
    """Start a server on a copy, wait for the end of the batch, and check that each line counts once."""
    async with batch_server(folder, journal) as bench:
        done = await bench.ended(batch_id)
        results = await bench.results(done)
        await settled(bench)
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert Counter(result["custom_id"] for result in results) == Counter(f"line-{n}" for n in range(12))
    told = {result["response"]["request_id"]: result["response"]["body"]["usage"] for result in results}
    records = billed(journal)
    assert {record.request_id for record in records} == set(told)
    assert len(records) == 12
    for record in records:
        usage = told[record.request_id]
        assert (record.prompt_tokens, record.completion_tokens) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
    total = sum(record.completion_tokens for record in records)
    assert done["usage"]["output_tokens"] == total == 72
    return results


class HeldService(BatchService):
    """A service whose results are stored, but whose records may be held back."""

    holds_stores = False
    holds_records = False
    holds_done = False

    def _keep(self, batch: Batch, result: LineResult, when_stored: Callable[[], object]) -> None:
        if self.holds_stores and batch.num_succeeded >= 4:
            return  # the answer is complete, and never reaches the disk
        if self.holds_records and batch.num_succeeded >= 4:
            super()._keep(batch, result, lambda: None)
        else:
            super()._keep(batch, result, when_stored)


@pytest.mark.parametrize("num_done", [0, 1, 5, 11])
async def test_lines_that_ran_when_the_server_died_run_again(tmp_path: Path, num_done: int) -> None:
    """Lines with a result and a record stay as they are; those that ran have a record that bills nothing, and run
    again."""
    limits, dials = BatchLimits(concurrency=3), Dials(step_seconds=0.01)
    async with batch_server(tmp_path / "first", limits=limits, dials=dials) as bench:
        batch = await bench.start(jsonl(LINES))
        with trio.fail_after(60):
            while (await bench.batch(batch["id"]))["request_counts"]["completed"] < num_done:
                await trio.lowlevel.checkpoint()
        journal = await bench.snapshot(tmp_path / "second")
    await finish_elsewhere(tmp_path / "second", journal, batch["id"])


@pytest.mark.parametrize("point", ["holds_stores", "holds_records"])
async def test_killed_between_result_and_record(tmp_path: Path, point: str) -> None:
    """A result that was stored without its record does not count, nor does an answer that was not stored: such lines
    run again, and only their second record bills tokens."""
    held: list[HeldService] = []

    def make(*arguments: Any) -> HeldService:
        held.append(HeldService(*arguments))
        setattr(held[0], point, True)
        return held[0]

    async with batch_server(
        tmp_path / "first", limits=BatchLimits(concurrency=2), make_service=make, dials=Dials(step_seconds=0.005)
    ) as bench:
        batch = await bench.start(jsonl(LINES))
        with trio.fail_after(60):
            while len(bench.journal.closed) < 4 or len(bench.journal.open) < 2 or not await _is_stuck(bench):
                await trio.sleep(0.01)
        journal = await bench.snapshot(tmp_path / "second")
        assert len(billed(journal)) == 4
    await finish_elsewhere(tmp_path / "second", journal, batch["id"])
    repeated = [record for record in journal.closed if record.fault is Fault.RECOVERED]
    assert len(repeated) == 2


async def _is_stuck(bench: Bench) -> bool:
    """Whether nothing more can happen: no sequence is live."""
    await trio.lowlevel.checkpoint()
    return not bench.client.runtime.desk.num_live_sequences


async def test_killed_after_the_record(tmp_path: Path) -> None:
    """A result whose record was written counts, although nothing was noted of it after that: it is not run again."""

    class Unnoted(BatchService):
        """Notes nothing of lines whose record was written."""

        async def _store_news(self) -> None:
            commit = self.store.commit

            def commit_without(kept: Sequence[LineResult], done: object, batches: Sequence[Batch]) -> None:
                commit(kept, (), batches)

            setattr(self.store, "commit", commit_without)  # noqa: B010 - mypy lets no method be assigned
            await super()._store_news()

    dials = Dials(step_seconds=0.005)
    async with batch_server(tmp_path / "first", make_service=Unnoted, dials=dials) as bench:
        batch = await bench.start(jsonl(LINES))
        await eventually(lambda: len(billed(bench.journal)) >= 3, "some lines are billed")
        journal = await bench.snapshot(tmp_path / "second")
        num_before = len(billed(journal))
    await finish_elsewhere(tmp_path / "second", journal, batch["id"])
    assert num_before >= 3


async def test_killed_amid_the_last_files(tmp_path: Path) -> None:
    """A server that dies while it writes the files of results writes them again, and leaves none of the first."""

    class Unfinished(BatchService):
        async def _finish(self, opened: Any) -> None:
            setattr(self.store, "end", lambda *_: _refuse())  # noqa: B010
            await super()._finish(opened)

    def _refuse() -> None:
        raise OSError("the disk is gone")

    async with batch_server(tmp_path / "first", make_service=Unfinished) as bench:
        batch = await bench.start(jsonl(LINES))
        with trio.fail_after(60):
            while (await bench.batch(batch["id"]))["status"] != "finalizing" or len(_files(bench.folder)) < 2:
                await trio.sleep(0.01)
        await settled(bench)
        journal = await bench.snapshot(tmp_path / "second")
    await finish_elsewhere(tmp_path / "second", journal, batch["id"])
    assert len(_files(tmp_path / "second")) == 2


def _files(folder: Path) -> list[Path]:
    return [path for path in (folder / "files").iterdir() if not path.name.startswith(".")]


async def test_killed_before_the_check(tmp_path: Path) -> None:
    """A batch whose file was not checked yet is checked, and run, by the next server."""

    class Unchecked(BatchService):
        async def _check(self, batch: Batch) -> None:
            await trio.sleep_forever()

    async with batch_server(tmp_path / "first", make_service=Unchecked) as bench:
        batch = await bench.start(jsonl(LINES))
        assert (await bench.batch(batch["id"]))["status"] == "validating"
        journal = await bench.snapshot(tmp_path / "second")
    await finish_elsewhere(tmp_path / "second", journal, batch["id"])


async def test_engine_that_dies_costs_no_result(tmp_path: Path) -> None:
    """Lines whose engine dies are resumed or run again; what the failed attempts did is not billed."""
    dials = Dials(step_seconds=0.005)
    async with batch_server(tmp_path, dials=dials, on_engine_death="fail", max_restarts=8) as bench:
        batch = await bench.start(jsonl(LINES))
        await eventually(lambda: len(billed(bench.journal)) >= 1, "a line is billed")
        kill_engine(bench.client)
        done = await bench.ended(batch["id"])
        results = await bench.results(done)
        await settled(bench)
        records = billed(bench.journal)
    assert done["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert {result["response"]["request_id"] for result in results} == {record.request_id for record in records}
    assert len(records) == 12


async def test_stop_amid_a_batch_bills_nothing(tmp_path: Path) -> None:
    """A server that stops fails the lines that run, unbilled, and the next one runs them."""
    dials = Dials(step_seconds=0.02)
    async with batch_server(tmp_path, dials=dials, limits=BatchLimits(concurrency=4)) as bench:
        batch = await bench.start(jsonl(LINES))
        await eventually(lambda: len(bench.journal.open) >= 3, "some lines run")
        await bench.client.runtime.desk.drain(0.0)
        await settled(bench)
        journal = bench.journal
    assert {record.fault for record in journal.closed if record.admitted_at is not None} <= {None, Fault.RECOVERED}
    assert any(record.fault is Fault.RECOVERED for record in journal.closed)
    await finish_elsewhere(tmp_path, journal, batch["id"])


async def test_full_disk_delays_a_batch(tmp_path: Path) -> None:
    """Results that the disk refuses are stored when it has room again; nothing is lost or run twice."""
    async with batch_server(tmp_path) as bench:
        commit, failures = bench.service.store.commit, [3]

        def refuse(*arguments: Any) -> None:
            if failures[0]:
                failures[0] -= 1
                raise OSError(28, "No space left on device")
            commit(*arguments)

        setattr(bench.service.store, "commit", refuse)  # noqa: B010
        batch = await bench.start(jsonl(LINES))
        done = await bench.ended(batch["id"])
        assert done["request_counts"]["completed"] == 12 and failures == [0]
        assert len(billed(bench.journal)) == 12
