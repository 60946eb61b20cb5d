"""One record, many projections: however a request ends, everything reported about it agrees with its record.

What is reported: usage to the client (each API, streamed or not, at the start, in between and at the end), log lines,
/metrics, the ledger's entry and the span. The tests run the real application over a whole runtime; the expected numbers
are computed from the prompt alone.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import attrs
import pytest
import structlog.testing
import trio

from quipu.actors.ledger.entries import Chain, parse_line
from quipu.actors.messages.counts import UNKNOWN, Known
from quipu.actors.messages.outcomes import FinishReason, Outcome
from quipu.actors.messages.prompts import TokenPrompt
from quipu.actors.messages.usage_record import UsageRecord
from quipu.kernels.fake import Dials
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.fake_oracle import continuation
from tests.journals import KeptJournal
from tests.runtimes import BLOCK, Client, small_runtime, text_of
from tests.traps.wire import samples
from tests.web.asgi_client import Client as HttpClient
from tests.web.asgi_client import Exchange
from tests.web.surfaces import SURFACES, Numbers, ResponseUsage, Surface, prompt_ids
from tests.web.telemetry.spans import KeepingTracer

WORDS = "A quipu is a ledger of cords, and each of its knots is a number that somebody has counted. " * 3
IDS = prompt_ids(WORDS)
CACHED = 3 * BLOCK
WRITTEN = len(IDS) // BLOCK * BLOCK - CACHED
assert WRITTEN > 0


@attrs.frozen
class End:
    """One way for a request to end, and the numbers expected of it."""

    outcome: Outcome
    finish_reason: FinishReason | None = None
    completion: int | None = None
    """None if it depends on how far the request came."""
    fields: dict[str, Any] = attrs.field(factory=dict)
    eos_after: int | None = None
    words: str = WORDS


def stop_string() -> tuple[str, int]:
    """Return a string from the middle of the model's text, and the index of the token that completes it."""
    output = continuation(IDS, 12)
    stop = text_of(output[:6]).removeprefix(text_of(output[:4]))
    number = next(n for n in range(1, 13) if stop in text_of(output[:n]))
    return stop, number


STOP, STOP_NUMBER = stop_string()
ENDS = {
    "length": End(Outcome.FINISHED, FinishReason.LENGTH, 8),
    "finished": End(Outcome.FINISHED, FinishReason.STOP, 4, {"max_tokens": 50}, eos_after=3),
    "stop-string": End(Outcome.FINISHED, FinishReason.STOP, STOP_NUMBER, {"max_tokens": 50, "stop": STOP}),
    "cancelled": End(Outcome.CANCELLED, fields={"max_tokens": 500}),
    "failed": End(Outcome.FAILED, fields={"max_tokens": 500}),
    "rejected": End(Outcome.REJECTED, completion=0, words=WORDS * 40),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("surface", SURFACES, ids=[surface.name for surface in SURFACES])
async def test_every_projection_agrees_with_the_record(
    surface: Surface, end: End, autojump_clock: trio.abc.Clock
) -> None:
    """Client, log, counters, ledger and span have the same numbers, and the expected ones."""
    journal, tracer = KeptJournal(), KeepingTracer()
    dials = Dials(step_seconds=0.01, eos_after=end.eos_after, eos_token_id=0)
    async with small_runtime(dials, journal=journal, eos_token_ids=(0,)) as client:
        await client.ask(TokenPrompt(tuple(IDS[:CACHED])), max_tokens=1)
        before = samples(client)
        with structlog.testing.capture_logs() as lines:
            reported = await run_request(client, tracer, surface, end, dials)
            with trio.fail_after(60):
                while client.runtime.entry_store.num_open_accounts:
                    await trio.sleep(0.01)
        after = samples(client)
    record = journal.closed[-1]
    check_record(record, end)
    check_reported_usage(reported, record, surface, end)
    check_log(lines, record)
    check_metrics({name: after[name] - before.get(name, 0) for name in after}, record)
    check_ledger(record)
    (span,) = tracer.all_spans()
    check_span(dict(span.attributes or {}), record)


async def run_request(client: Client, tracer: KeepingTracer, surface: Surface, end: End, dials: Dials) -> ResponseUsage:
    """Send a request, make it end as `end` says, and return what was received."""
    http = HttpClient(make_app(client.runtime.desk, AppOptions(domain="tenant", heartbeat_s=math.inf), tracer=tracer))
    data = bytearray()

    async def read(exchange: Exchange) -> None:
        with suppress(trio.EndOfChannel):
            await exchange.wait_started()
            while not exchange.ended:
                data.extend(await exchange.read_some())

    async with http.open("POST", surface.path, surface.body(end.words, **end.fields)) as exchange:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, exchange)
            if end.outcome in (Outcome.CANCELLED, Outcome.FAILED):
                while not samples(client)["num_requests_running"]:  # tokenizing takes real time
                    await trio.sleep(0.01)
                await trio.sleep(0.085)
                if end.outcome is Outcome.FAILED:
                    dials.fail_steps = 2
                else:
                    exchange.leave()
    return surface.read(bytes(data))


def check_record(record: UsageRecord, end: End) -> None:
    """The record has the numbers computed from the prompt, except where a client left or a step failed."""
    assert (record.outcome, record.finish_reason, record.disputed) == (end.outcome, end.finish_reason, False)
    if end.outcome is Outcome.REJECTED:
        assert record.prompt == record.cached == record.cache_write == UNKNOWN
    else:
        assert (record.prompt, record.cached, record.cache_write) == (Known(len(IDS)), Known(CACHED), Known(WRITTEN))
    if end.completion is not None:
        assert record.completion_tokens == end.completion
    else:
        assert 5 <= record.completion_tokens <= 15


def check_reported_usage(reported: ResponseUsage, record: UsageRecord, surface: Surface, end: End) -> None:
    """Every number sent to the client is the record's, and is present wherever its API documents it."""
    ends_well = end.outcome is Outcome.FINISHED
    has_final = ends_well or (end.outcome is Outcome.FAILED and surface.name == "responses-streamed")
    assert len(reported.finals) == has_final
    assert reported.is_error == (end.outcome in (Outcome.FAILED, Outcome.REJECTED))
    assert reported.has_ended == (end.outcome is not Outcome.CANCELLED)
    for numbers in reported.finals:
        check_numbers(numbers, record)
        assert numbers.completion == record.completion_tokens
    is_begun = end.outcome is not Outcome.REJECTED
    assert len(reported.starts) == (is_begun and surface.name == "messages-streamed")
    for numbers in reported.starts:
        check_numbers(numbers, record)
        assert numbers.completion in (0, 1)
    assert bool(reported.running) == (is_begun and surface.continuous)
    for numbers in reported.running:
        check_numbers(numbers, record)
    counts = [numbers.completion for numbers in reported.running]
    assert counts == sorted(counts)
    if counts:
        assert counts[-1] <= record.completion_tokens
        assert counts[-1] == record.completion_tokens or not ends_well


def check_numbers(numbers: Numbers, record: UsageRecord) -> None:
    assert (Known(numbers.prompt), Known(numbers.cached)) == (record.prompt, record.cached)
    assert numbers.written is None or Known(numbers.written) == record.cache_write
    if numbers.created is not None:
        assert numbers.created == record.created_5m_tokens + record.created_1h_tokens > 0


def check_log(lines: list[Any], record: UsageRecord) -> None:
    """The request's log line, its closing at debug level, and the cache sums after its admission."""
    for event in ("request.done", "account.closed"):
        (line,) = [line for line in lines if line["event"] == event]
        assert line["request_id"] == record.request_id and line["outcome"] == record.outcome
        reported = (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"])
        assert reported == (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
    stats = [line for line in lines if line["event"] == "prefix_cache.stats"]
    assert len(stats) == isinstance(record.prompt, Known)
    for line in stats:
        assert line["log_level"] == "debug"
        sums = (line["total_requests"], line["total_prompt_tokens"], line["total_cached_tokens"])
        assert sums == (2, CACHED + (record.prompt_tokens or 0), record.cached_tokens)


def check_metrics(risen: dict[str, float], record: UsageRecord) -> None:
    """Check by how much this request has increased each counter."""
    prompt, cached = record.prompt_tokens or 0, record.cached_tokens or 0
    assert risen["prompt_tokens_total"] == risen["prefix_cache_queries_total"] == prompt
    assert risen['cached_tokens_total{tier="device"}'] == risen["prefix_cache_hits_total"] == cached
    assert risen["generation_tokens_total"] == record.completion_tokens
    assert risen["recomputed_tokens_total"] == record.recomputed_tokens
    assert risen["moved_tokens_total"] == record.moved_tokens
    assert risen["spec_decode_num_draft_tokens_total"] == record.draft_tokens
    assert risen["spec_decode_num_accepted_tokens_total"] == record.accepted_draft_tokens
    assert risen["request_cached_tokens_count"] == isinstance(record.cached, Known)
    assert risen["request_cached_tokens_sum"] == cached
    outcomes = {outcome: risen[f'requests_total{{outcome="{outcome}"}}'] for outcome in Outcome}
    assert outcomes == {outcome: int(outcome is record.outcome) for outcome in Outcome}
    assert risen["usage_disputed_total"] == risen["open_accounts"] == 0


def check_ledger(record: UsageRecord) -> None:
    """The write-ahead file contains the complete record."""
    entry = parse_line(Chain("srv").close(record.closed_at, record).data.rstrip(b"\n"))
    assert entry is not None and entry.record() == record


def check_span(attributes: dict[str, Any], record: UsageRecord) -> None:
    """Known numbers are attributes; unknown ones are absent."""
    names = {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": record.cache_write_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
    }
    known = {name: value for name, value in names.items() if value is not None}
    assert {name: value for name, value in attributes.items() if name.startswith("gen_ai.usage.")} == known
    assert attributes["quipu.outcome"] == record.outcome
