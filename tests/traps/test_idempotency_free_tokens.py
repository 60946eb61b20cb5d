"""Trap: an idempotency key that collapses retries makes the tokens of all but one of them free.

Here every request counts what it generated, whatever its key. A key links a retry to the first request but does not
change a bill: neither if each retry is answered completely, nor if the client leaves each of them before its end.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio

from quipu.actors.messages.outcomes import Outcome
from tests.runtimes import full_blocks
from tests.traps.bills import KEY, Bill, bill_of, open_billed_runtime, records_of

NUM = 20
MAX_TOKENS = 200


async def test_complete_retries_are_billed(tmp_path: Path) -> None:
    """Twenty requests with one key, 200 tokens each: 4,000 were generated, and 4,000 are billed."""
    async with open_billed_runtime(tmp_path, num_blocks=512) as billed:
        await billed.send(KEY, max_tokens=MAX_TOKENS)
        async with trio.open_nursery() as nursery:
            for _ in range(NUM - 1):
                nursery.start_soon(partial(billed.send, KEY, max_tokens=MAX_TOKENS))
        generated, prompted = billed.num_generated, billed.num_prompt_tokens
    records = records_of(tmp_path, billed.ids)
    first = records[0].request_id
    assert [record.retry_of for record in records] == [None, *[first] * (NUM - 1)], "the key must link them"
    assert (generated, prompted) == (NUM * MAX_TOKENS, NUM * 50)
    cached = sum(record.cached_tokens or 0 for record in records)
    assert await bill_of(tmp_path) == Bill(NUM, prompted, cached, generated)
    assert await bill_of(tmp_path, retries="collapse") == Bill(1, 50, 0, MAX_TOKENS), (
        "retries must be collapsed on request"
    )


async def test_cut_short_retries_are_billed(tmp_path: Path) -> None:
    """Twenty streams with one key, each left after its first chunk: everything generated is billed."""
    async with open_billed_runtime(tmp_path) as billed:
        for _ in range(NUM):
            await billed.send_and_leave(KEY)
        generated, prompted = billed.num_generated, billed.num_prompt_tokens
    records = records_of(tmp_path, billed.ids)
    assert {record.outcome for record in records} == {Outcome.CANCELLED}
    assert generated == sum(record.completion_tokens for record in records) >= NUM
    bill = await bill_of(tmp_path)
    assert (bill.requests, bill.prompt, bill.output) == (NUM, prompted, generated)


async def test_key_does_not_change_the_bill(tmp_path: Path) -> None:
    """The same requests with the same key, with different keys, and without: the same bill."""
    bills = []
    for name, headers in {
        "same": [KEY] * 3,
        "own": [{"Idempotency-Key": f"key-{number}"} for number in range(3)],
        "none": [dict[str, str]()] * 3,
    }.items():
        async with open_billed_runtime(tmp_path / name) as billed:
            for each in headers:
                await billed.send(each)
        bills.append(await bill_of(tmp_path / name))
    assert bills[0] == bills[1] == bills[2] == Bill(3, 150, 2 * full_blocks(50), 24)
