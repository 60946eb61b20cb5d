"""Histories compacted by a whole server on the fake executor: cached, counted, cancelled and refused as any request."""

from __future__ import annotations

from typing import Any

import trio

from quipu.actors.messages.outcomes import Outcome
from tests.runtimes import BLOCK, small_runtime
from tests.traps.wire import over_http, samples, settle

PATH, COMPACT = "/v1/responses", "/v1/responses/compact"
CONTEXT = 26 * BLOCK
TEXT = "Nora planted a larch. A flock of sparrows crossed the vineyards. Finn hid under the staircase."
SETTINGS: dict[str, Any] = {"max_model_len": CONTEXT}


async def test_cached_counted_and_continued(autojump_clock: trio.abc.Clock) -> None:
    """The history is found in the cache, the record is what the usage says, and what follows the summary is cached."""
    async with small_runtime(**SETTINGS) as client:
        http = over_http(client)
        asked = {"model": "demo", "instructions": "Answer briefly.", "input": TEXT}
        _, answer = await http.post(PATH, {**asked, "max_output_tokens": BLOCK})
        history = [{"role": "user", "content": TEXT}, *answer["output"]]
        exchange, compacted = await http.post(COMPACT, {**asked, "input": history})
        assert exchange.status == 200, compacted
        usage = compacted["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= answer["usage"]["input_tokens"] // BLOCK * BLOCK > 0
        assert usage["input_tokens"] + usage["output_tokens"] == CONTEXT, "the fake model writes to the end"
        (record,) = [record for record in client.records if record.endpoint == COMPACT]
        assert record.outcome is Outcome.FINISHED and record.cached_tokens is not None
        assert (record.prompt_tokens, record.completion_tokens) == (usage["input_tokens"], usage["output_tokens"])
        assert record.cached_tokens == usage["input_tokens_details"]["cached_tokens"]

        short = compacted["output"][:1]
        item = await summary_of(http)
        later = {"model": "demo", "input": [*short, item, {"role": "user", "content": "And?"}], "max_output_tokens": 1}
        _, counted = await http.post(f"{PATH}/input_tokens", later)
        found = []
        for _ in range(2):
            exchange, again = await http.post(PATH, later)
            assert exchange.status == 200, again
            assert again["usage"]["input_tokens"] == counted["input_tokens"]
            found.append(again["usage"]["input_tokens_details"]["cached_tokens"])
        assert found[1] == (counted["input_tokens"] - 1) // BLOCK * BLOCK > found[0]
        await settle(client)


async def summary_of(http: Any) -> dict[str, Any]:
    """Return a sealed summary that is short, since its history leaves no room for more."""
    filler = "word " * 400
    for length in range(len(filler), 0, -5):
        exchange, answer = await http.post(COMPACT, {"model": "demo", "input": filler[:length]})
        if exchange.status == 200:
            return dict(answer["output"][-1])
    raise AssertionError("no history is short enough")


async def test_too_long(autojump_clock: trio.abc.Clock) -> None:
    """A history that leaves no room for a summary is a 400 as elsewhere, which names the input or the instructions."""
    async with small_runtime(**SETTINGS) as client:
        http = over_http(client)
        long = TEXT * 20
        for fields, param in (({"input": long}, "input"), ({"input": "x", "instructions": long}, "instructions")):
            exchange, answer = await http.post(COMPACT, {"model": "demo", **fields})
            assert (exchange.status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert answer["error"]["param"] == param and "prompt is too long" in answer["error"]["message"]
        await settle(client)


async def test_client_leaves(autojump_clock: trio.abc.Clock) -> None:
    """A client that leaves while the summary is written frees everything within two steps, and pays what was done."""
    async with small_runtime(**SETTINGS) as client:
        async with over_http(client).open("POST", COMPACT, {"model": "demo", "input": TEXT}) as exchange:
            await trio.sleep(0.055)
            assert samples(client)["open_accounts"] == 1
            exchange.leave()
            left_at = trio.current_time()
            await settle(client)
            assert trio.current_time() - left_at < 0.035
        (record,) = client.records
        assert (record.outcome, record.endpoint) == (Outcome.CANCELLED, COMPACT) and record.completion_tokens > 0
