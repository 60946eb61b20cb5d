"""Trap: a client that heard nothing sends its request again, and is charged for both.

Here an idempotency key marks the second as a retry of the first: the work may be done again, its record says of which
request, and reports count one of them. Without the same key and body nobody can know, and both are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, settle

from houses import small_house
from quipu.actors.ledger.queries import Sum
from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.messages import Outcome, UsageRecord
from quipu.kernels.fake import Dials

REQUEST = body(prompt_of(50))
KEY = {"Idempotency-Key": "8e03978e"}


@attrs.frozen
class Sent:
    headers: dict[str, str]
    body: dict[str, Any] = REQUEST
    leaves: bool = False
    """The client goes away in mid-stream."""


async def books_of(folder: Path, *sent: Sent) -> tuple[list[UsageRecord], Sum, Sum]:
    """The records of requests sent one after the other, oldest first; their sums, and those of all work."""
    ids = []
    async with (
        open_ledger(LedgerConfig(folder)) as ledger,
        small_house(Dials(step_seconds=0.001), journal=ledger.journal) as client,
    ):
        http = over_http(client)
        for each in sent:
            long = {**each.body, "max_tokens": 300, **STREAMED} if each.leaves else each.body
            async with http.open("POST", COMPLETIONS, long, each.headers) as exchange:
                assert await exchange.wait_started() == 200
                ids.append(exchange.headers["x-quipu-request-id"])
                if each.leaves:
                    await exchange.read_some()
                    exchange.leave()
                    await trio.testing.wait_all_tasks_blocked()
                else:
                    await exchange.read()
            await settle(client)
    with open_reader(data_dir=folder) as reader:
        found = {each.record.request_id: each.record for each in reader.records()}
        (sums,), (work,) = reader.sums(), reader.sums(with_retries=True)
    return [found[request_id] for request_id in ids], sums, work


async def test_a_retry_is_not_charged(tmp_path: Path) -> None:
    """Three times the same: two are retries of the first, each answered and recorded, one counted."""
    records, sums, work = await books_of(tmp_path, Sent(KEY), Sent(KEY), Sent(KEY))
    first = records[0]
    assert [record.retry_of for record in records] == [None, first.request_id, first.request_id]
    assert [record.completion_tokens for record in records] == [8, 8, 8]
    assert (sums.num_requests, sums.prompt_tokens, sums.completion_tokens) == (1, 50, 8)
    assert (sums.cached_tokens, sums.cache_write_tokens) == (0, 48), "those of the one that is counted"
    assert (work.num_requests, work.prompt_tokens, work.cached_tokens) == (3, 150, 96)


async def test_a_retry_of_one_that_was_cut_off(tmp_path: Path) -> None:
    """The client lost its connection in mid-stream and sends the same bytes again."""
    long = {**REQUEST, "max_tokens": 300, **STREAMED}
    records, sums, _ = await books_of(tmp_path, Sent(KEY, long, leaves=True), Sent(KEY, long))
    assert [record.outcome for record in records] == [Outcome.CANCELLED, Outcome.FINISHED]
    assert [record.retry_of for record in records] == [None, records[0].request_id]
    assert (sums.num_requests, sums.prompt_tokens) == (1, 50)


@pytest.mark.parametrize(
    "second",
    [
        Sent({}),
        Sent({"Idempotency-Key": "another"}),
        Sent(KEY, {**REQUEST, "max_tokens": 7}),
        Sent(KEY, {**REQUEST, "seed": 1}),
    ],
    ids=["no key", "another key", "another body", "another seed"],
)
async def test_what_is_no_retry(tmp_path: Path, second: Sent) -> None:
    """Other work, or nobody can know: both are charged."""
    records, sums, _ = await books_of(tmp_path, Sent(KEY), second)
    assert [record.retry_of for record in records] == [None, None]
    assert (sums.num_requests, sums.prompt_tokens) == (2, 100)


async def test_no_key_at_all(tmp_path: Path) -> None:
    """Equal requests are not retries by themselves."""
    _, sums, _ = await books_of(tmp_path, Sent({}), Sent({}))
    assert (sums.num_requests, sums.prompt_tokens) == (2, 100)
