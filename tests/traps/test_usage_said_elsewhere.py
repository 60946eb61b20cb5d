"""Trap: an upstream says its cached tokens under another name than OpenAI's, and they are unknown.

DeepSeek says `prompt_cache_hit_tokens`, Moonshot `cached_tokens` beside `prompt_tokens`, gateways to Anthropic's API
`cache_read_input_tokens` and `cache_creation_input_tokens`. Here each is a count, for the record, the counters and the
client; two that differ make the count unknown.
"""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.counts import UNKNOWN, Count, Known
from tests.upstreams import open_fake, says

SAID: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}
ANTHROPIC = {"cache_read_input_tokens": 64, "cache_creation_input_tokens": 16}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("said", "cached", "written"),
    [
        ({"prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36}, Known(64), UNKNOWN),
        ({"prompt_cache_hit_tokens": 0, "prompt_tokens_details": None}, Known(0), UNKNOWN),
        ({"cached_tokens": 64}, Known(64), UNKNOWN),
        (ANTHROPIC, Known(64), Known(16)),
        ({"prompt_tokens_details": {"cached_tokens": 64, **ANTHROPIC}}, Known(64), Known(16)),
        ({"prompt_tokens_details": {"audio_tokens": 1}, "cached_tokens": 64}, Known(64), UNKNOWN),
    ],
    ids=["DeepSeek", "DeepSeek's 0", "Moonshot", "Anthropic", "details", "beside details"],
)
async def test_names_are_read_as_counts(said: dict[str, Any], cached: Count, written: Count, streams: bool) -> None:
    """The record, the counters and the client's usage have the number; the upstream's own fields stay as they are."""
    usage = SAID | said
    async with open_fake(says(usage)) as (served, _):
        if streams:
            told = (await served.stream(stream_options={"include_usage": True}))[-2]["usage"]
        else:
            told = (await served.ask()).json()["usage"]
        record, counters = await served.record(), served.counters()
    assert (record.cached, record.cache_write, record.disputed) == (cached, written, False)
    hits = sum(value for name, value in counters.items() if name.startswith("prefix_cache_hits_total"))
    assert hits == (cached.n if isinstance(cached, Known) else 0)
    details = told["prompt_tokens_details"]
    numbers = {"cached_tokens": cached, "cache_write_tokens": written}
    assert {name: details[name] for name in numbers if name in details} == {
        name: count.n for name, count in numbers.items() if isinstance(count, Known)
    }
    assert {name: told[name] for name in said if name != "prompt_tokens_details"} == {
        name: value for name, value in said.items() if name != "prompt_tokens_details"
    }


@pytest.mark.parametrize(
    "said",
    [
        {"prompt_cache_hit_tokens": 64, "prompt_tokens_details": {"cached_tokens": 32}},
        {"cached_tokens": 64, "cache_read_input_tokens": -1},
        {"cache_read_input_tokens": 101},
    ],
    ids=["two numbers", "one that cannot be", "more than the prompt"],
)
async def test_numbers_that_differ_are_none(said: dict[str, Any]) -> None:
    """The count is unknown, the record disputed, and the client gets none of the numbers."""
    async with open_fake(says(SAID | said)) as (served, _):
        told = (await served.ask()).json()["usage"]
        record = await served.record()
    assert (record.cached, record.disputed, record.prompt) == (UNKNOWN, True, Known(100))
    assert not [name for name in said if told.get(name)] and not told.get("prompt_tokens_details")
