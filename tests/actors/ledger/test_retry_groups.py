"""Reports that collapse retries count one record of a request and its retries; other reports count each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from quipu.actors.ledger.reading import Query, open_reader
from quipu.actors.ledger.service import Ledger
from quipu.actors.messages.outcomes import Fault, Outcome
from tests.actors.ledger.ledgers import record_of, so_far_of
from tests.actors.ledger.test_service import loaded, opened, sqlite_url

SAME = {"idempotency_digest": "d" * 64}


@attrs.frozen
class Ended:
    outcome: Outcome
    fault: Fault | None = None


DONE, CANCELLED, FAILED = Ended(Outcome.FINISHED), Ended(Outcome.CANCELLED), Ended(Outcome.FAILED)
ENGINE_DIED = Ended(Outcome.FAILED, Fault.ENGINE_DIED)

# each: (request, tokens, end, the request it retries) in the order of their ends; then the tokens that count
GROUPS = {
    "the first is complete": ([("a", 10, DONE, None), ("b", 20, DONE, "a"), ("c", 30, DONE, "a")], 10),
    "a retry is complete": ([("a", 5, CANCELLED, None), ("b", 3000, DONE, "a")], 3000),
    "two retries are complete": (
        [("a", 5, FAILED, None), ("b", 7, CANCELLED, "a"), ("c", 9, DONE, "a"), ("d", 11, DONE, "a")],
        9,
    ),
    "none is complete": ([("a", 5, CANCELLED, None), ("b", 8, FAILED, "a")], 5),
    "the first ends last, complete": ([("b", 20, DONE, "a"), ("a", 10, DONE, None)], 10),
    "the first ends last, cut short": ([("b", 20, DONE, "a"), ("a", 4, CANCELLED, None)], 20),
    "the first has not ended": ([("b", 20, DONE, "a")], 0),
    "the server failed the first, a retry is complete": (
        [("a", 5, ENGINE_DIED, None), ("b", 7, CANCELLED, "a"), ("c", 9, DONE, "a")],
        9,
    ),
    "the server failed the first, a client left": (
        [("a", 5, ENGINE_DIED, None), ("b", 7, ENGINE_DIED, "a"), ("c", 9, CANCELLED, "a")],
        9,
    ),
    "the server failed a retry": ([("a", 5, CANCELLED, None), ("b", 7, ENGINE_DIED, "a")], 5),
}


def book(ledger: Ledger, request_id: str, num_tokens: int, ended: Ended, retry_of: str | None, at: int) -> None:
    fields = {"completion_tokens": num_tokens, "outcome": ended.outcome, "fault": ended.fault, "retry_of": retry_of}
    fields |= SAME
    assert ledger.journal.admit(so_far_of(request_id, retry_of=retry_of, **SAME))
    ledger.journal.close(record_of(request_id, closed_at=record_of("x").closed_at + at, **fields), lambda: None)
    ledger.journal.flush()


@pytest.mark.parametrize("name", GROUPS)
async def test_one_of_a_group_counts(tmp_path: Path, name: str) -> None:
    """Of a group, one record counts, with any part of the group in the database and the rest in the file."""
    group, expected = cast(tuple[list[Any], Any], GROUPS[name])
    for num_loaded in range(len(group) + 1):
        folder = tmp_path / str(num_loaded)
        async with opened(folder) as ledger:
            for at, member in enumerate(group[:num_loaded]):
                book(ledger, *[*member, at])
            await loaded(ledger)
            for at, member in enumerate(group[num_loaded:], num_loaded):
                book(ledger, *[*member, at])
            with open_reader(data_dir=folder) as reader:
                (both,) = reader.sums(Query(), collapse_retries=True)
                (every,) = reader.sums(Query())
        with open_reader(url=sqlite_url(folder)) as reader:
            (later,) = reader.sums(Query(), collapse_retries=True)
        assert both.completion_tokens == later.completion_tokens == expected
        assert both.num_requests == later.num_requests == (expected > 0)
        assert every.num_requests == len(group)
        assert every.completion_tokens == sum(tokens for _, tokens, ended, _ in group if ended.fault is None)


async def test_groups_are_separate(tmp_path: Path) -> None:
    """A key used for other work is another group; a retry counts in the bucket in which it closed."""
    other = {"idempotency_digest": "e" * 64}
    async with opened(tmp_path) as ledger:
        book(ledger, "a", 5, CANCELLED, None, 0)
        assert ledger.journal.admit(so_far_of("z", **other))
        ledger.journal.close(record_of("z", completion_tokens=7, outcome=CANCELLED.outcome, **other), lambda: None)
        book(ledger, "b", 100, DONE, "a", 3600)
        with open_reader(data_dir=tmp_path) as reader:
            sums = reader.sums(Query(), bucket_s=3600, collapse_retries=True)
    assert [s.completion_tokens for s in sums] == [7, 100]


async def test_group_of_only_faults(tmp_path: Path) -> None:
    """A group of faults counts as one request without tokens, from the file and from the database."""
    async with opened(tmp_path) as ledger:
        book(ledger, "a", 5, ENGINE_DIED, None, 0)
        book(ledger, "b", 7, Ended(Outcome.FAILED, Fault.STEP_FAILED), "a", 1)
        for _ in range(2):
            with open_reader(data_dir=tmp_path) as reader:
                (collapsed,), (every,) = reader.sums(collapse_retries=True), reader.sums()
            assert (collapsed.num_requests, collapsed.num_faulted, collapsed.prompt_tokens) == (1, 1, 0)
            assert (every.num_requests, every.num_faulted, every.completion_tokens) == (2, 2, 0)
            await loaded(ledger)
