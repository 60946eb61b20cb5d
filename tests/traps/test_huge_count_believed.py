"""Trap: an upstream's impossible count enters the books.

1,025 records of 2**53 - 1 tokens overflow the sum of every report, for all tenants; 80 cached and 80 written of 100
tokens leave a negative input. Here such a number is unknown and the record disputed, and a ledger that has believed one
before can still be added up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quipu.actors.ledger.reading import open_reader
from quipu.actors.messages.counts import MAX_COUNT, UNKNOWN, Known
from tests.actors.ledger.open_ledgers import loaded, opened, write
from tests.upstreams import open_fake, says

HUGE = 2**53 - 1
"""The most that JSON's readers agree on."""
DETAILS = "prompt_tokens_details"


@pytest.mark.parametrize(
    "said",
    [
        {"prompt_tokens": HUGE, DETAILS: {"cached_tokens": 1}},
        {"prompt_tokens": MAX_COUNT + 1, "completion_tokens": MAX_COUNT + 1},
        {"prompt_tokens": 10**30},
        {"prompt_tokens": 100, DETAILS: {"cached_tokens": 80, "cache_write_tokens": 80}},
        {"prompt_tokens": 100, "cache_read_input_tokens": 80, "cache_creation_input_tokens": 21},
        {"prompt_tokens": 100, DETAILS: {"cached_tokens": 101}},
        {"prompt_tokens": 100, DETAILS: {"cached_tokens": -1}},
        {"prompt_tokens": 100, "prompt_cache_hit_tokens": 1e3},
    ],
)
async def test_count_that_cannot_be_is_unknown(said: dict[str, Any]) -> None:
    """The record is disputed and its count unknown; neither a counter nor the client gets the number."""
    usage = {"completion_tokens": 2, **said}
    async with open_fake(says(usage)) as (served, _):
        told = (await served.ask()).json()["usage"]
        record, counters = await served.record(), served.counters()
    assert record.disputed and (record.cached, record.cache_write) == (UNKNOWN, UNKNOWN)
    is_huge = said["prompt_tokens"] > MAX_COUNT
    assert record.prompt == (UNKNOWN if is_huge else Known(100))
    assert sum(value for name, value in counters.items() if name.startswith("prompt_tokens_total")) <= 100
    if is_huge:
        assert told is None
    else:
        numbers = {**told, **told.get(DETAILS, {})}
        assert not [name for name in numbers if "cache" in name]


async def test_reports_survive_what_was_believed(tmp_path: Path) -> None:
    """Sums leave out impossible counts in records of an earlier version, in the file and in the database."""
    believed = {"prompt": Known(2**62), "completion_tokens": 2**62, "cached": Known(2**62)}
    async with opened(tmp_path) as ledger:
        await write(ledger, "request-a", "request-b", "request-c", **believed)
        await write(ledger, "request-d")
        with open_reader(data_dir=tmp_path) as reader:
            before = reader.sums()
        await loaded(ledger)
    with open_reader(data_dir=tmp_path) as reader:
        (total,) = reader.sums()
        by_group = reader.sums(group_by=("tenant", "model"), bucket_s=60, collapse_retries=True)
        assert len(list(reader.records())) == 4
    assert before == [total]
    assert (total.num_requests, total.prompt_tokens, total.completion_tokens, total.queried_tokens) == (4, 100, 10, 100)
    assert [one.prompt_tokens for one in by_group] == [100]
