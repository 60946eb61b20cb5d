"""After a random run, the sums of counters, ledger records, log lines, spans and reported usage are equal.

Hundreds of requests of several tenants use every endpoint, whole and streamed, on a runtime that is too small for
them: some leave, some are refused, some steps fail, many are preempted. Once no account is open all sums are equal, and
every usage reported to a client equals its record.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import attrs
import pytest
import structlog.testing
import trio

from quipu.actors.ledger.entries import Chain, parse_line
from quipu.actors.messages.counts import Known
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.kernels.fake import Dials
from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.options import AppOptions
from tests.journals import KeptJournal
from tests.runtimes import BLOCK, small_runtime
from tests.traps.wire import samples
from tests.web.asgi_client import Client as HttpClient
from tests.web.asgi_client import Exchange
from tests.web.surfaces import SURFACES, Numbers, ResponseUsage, Surface
from tests.web.telemetry.spans import KeepingTracer

NUM_AT_ONCE = 40
TENANTS = ("ada", "blaise", "charles")
POISON = 3999
STEM = "A quipu is a ledger of cords, and each of its knots is a number that somebody has counted. "


@attrs.frozen
class Plan:
    """One request, drawn in advance."""

    surface: Surface
    tenant: str
    body: dict[str, Any]
    arrives_after_s: float
    leaves_after_s: float | None


@attrs.define
class SentRequest:
    """The result of one request, as its client saw it."""

    plan: Plan
    request_id: str = ""
    status: int = 0
    data: bytearray = attrs.field(factory=bytearray)

    def reported(self) -> ResponseUsage:
        return self.plan.surface.read(bytes(self.data))


def draw_plan(rng: random.Random) -> Plan:
    surface = rng.choice(SURFACES)
    words = STEM * rng.randint(0, 5) + f"What about {rng.randrange(30)}?"
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 40)}
    if rng.random() < 0.1:
        fields["stop"] = rng.choice("aeiou")
    body = surface.body(words, **fields)
    fate = rng.random()
    if fate < 0.03:
        body = surface.body(STEM * 100, **fields)  # longer than the context: it gets an account
    elif fate < 0.05:
        body["temperature"] = "warm"  # never opened
    elif surface.api == "completions":
        if fate < 0.3:
            body["prompt"] = [*rng.choices(range(300, 3000), k=20), POISON]
        elif fate < 0.5:
            body["prompt"] = [body["prompt"], STEM * rng.randint(1, 3)]
    if surface.api in ("completions", "chat") and rng.random() < 0.2:
        body |= {"n": rng.randint(2, 3), "temperature": 0.7 if body["temperature"] == 0 else body["temperature"]}
    leaves_after_s = rng.expovariate(4) if rng.random() < 0.15 else None
    return Plan(surface, rng.choice(TENANTS), body, rng.expovariate(200), leaves_after_s)


def key_store() -> KeyStore:
    return KeyStore(
        [KeyEntry(id=f"key-{t}", name=t, tenant=t, sha256=hash_key(f"sk-{t}"), admin=False) for t in TENANTS]
    )


async def send_request(http: HttpClient, sent: SentRequest) -> None:
    plan = sent.plan

    async def read(exchange: Exchange, scope: trio.CancelScope) -> None:
        with suppress(trio.EndOfChannel):
            sent.status = await exchange.wait_started()
            sent.request_id = exchange.headers["x-quipu-request-id"]
            while not exchange.ended:
                sent.data += await exchange.read_some()
        scope.cancel()

    headers = {"Authorization": f"Bearer sk-{plan.tenant}"}
    async with http.open("POST", plan.surface.path, plan.body, headers) as exchange:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, exchange, nursery.cancel_scope)
            if plan.leaves_after_s is not None:
                await trio.sleep(plan.leaves_after_s)
                exchange.leave()


@pytest.mark.timeout(600)  # for a thousand requests
@pytest.mark.parametrize(("seed", "num_requests"), [(1, 400), pytest.param(2, 1000, marks=pytest.mark.slow)])
async def test_all_sums_are_equal(seed: int, num_requests: int, autojump_clock: trio.abc.Clock) -> None:
    """Counters == records == log == spans, and records == the usage reported to clients."""
    rng = random.Random(seed)
    requests = [SentRequest(draw_plan(rng)) for _ in range(num_requests)]
    journal, tracer = KeptJournal(), KeepingTracer()
    dials = Dials(step_seconds=0.01, poison_token_id=POISON)
    runtime = small_runtime(
        dials,
        journal=journal,
        num_blocks=40,
        max_model_len=39 * BLOCK,
        max_num_seqs=24,
        max_waiting_requests=60,
        watermark=0.0,
    )
    with structlog.testing.capture_logs() as lines:
        async with runtime as client:
            http = HttpClient(make_app(client.runtime.desk, AppOptions(), key_store(), tracer=tracer))
            at_once = trio.Semaphore(NUM_AT_ONCE)

            async def send_and_release(sent: SentRequest) -> None:
                await send_request(http, sent)
                at_once.release()

            async with trio.open_nursery() as nursery:
                for sent in requests:
                    await trio.sleep(sent.plan.arrives_after_s)
                    await at_once.acquire()
                    nursery.start_soon(send_and_release, sent)
            with trio.fail_after(600):
                while client.runtime.entry_store.num_open_accounts or client.runtime.desk.num_live_sequences:
                    await trio.sleep(0.01)
            counters = samples(client)
    records = {record.request_id: record for record in restored(journal.closed)}
    assert len(records) == len(journal.closed) and journal.open == {}
    check_mixture(records, requests, counters)
    check_counters(list(records.values()), counters)
    check_reported_usage(records, requests)
    check_log(records, lines, counters, num_requests)
    check_spans(records, tracer, num_requests)


def restored(closed: list[UsageRecord]) -> list[UsageRecord]:
    """Return the records as read back from a write-ahead file."""
    chain, kept = Chain("srv"), []
    for record in closed:
        entry = parse_line(chain.close(record.closed_at, record).data.rstrip(b"\n"))
        assert entry is not None
        kept.append(entry.record())
    return kept


def check_mixture(records: dict[str, UsageRecord], requests: list[SentRequest], counters: dict[str, float]) -> None:
    """The run contains enough of each kind of request."""
    outcomes = Counter(record.outcome for record in records.values())
    assert min(outcomes[outcome] for outcome in Outcome) > len(requests) / 50
    assert outcomes[Outcome.FINISHED] > len(requests) / 2
    assert counters["num_preemptions_total"] > len(requests) / 20 and counters["recomputed_tokens_total"] > 0
    assert {record.tenant for record in records.values()} == set(TENANTS)
    assert {sent.plan.surface.name for sent in requests if sent.reported().finals} == {s.name for s in SURFACES}
    assert {status for sent in requests if (status := sent.status)} >= {200, 400, 500}


def check_counters(records: list[UsageRecord], counters: dict[str, float]) -> None:
    """Each counter is the sum over the records; no account is disputed."""
    admitted = [record for record in records if isinstance(record.prompt, Known)]
    prompt = sum(record.prompt_tokens or 0 for record in admitted)
    cached = sum(record.cached_tokens or 0 for record in admitted)
    assert counters["open_accounts"] == counters["usage_disputed_total"] == 0
    assert not any(record.disputed for record in records)
    assert counters["prompt_tokens_total"] == counters["prefix_cache_queries_total"] == prompt > 0
    assert counters["prefix_cache_hits_total"] == counters["request_cached_tokens_sum"] == cached > 0
    for tier in ("device", "host", "disk", "remote", "unattributed"):
        in_tier = sum((record.cached_by_tier or {}).get(tier, 0) for record in admitted)
        assert counters[f'cached_tokens_total{{tier="{tier}"}}'] == in_tier
    assert counters["generation_tokens_total"] == sum(record.completion_tokens for record in records)
    assert counters["recomputed_tokens_total"] == sum(record.recomputed_tokens for record in records)
    assert counters["moved_tokens_total"] == sum(record.moved_tokens for record in records)
    assert counters["spec_decode_num_draft_tokens_total"] == sum(record.draft_tokens for record in records)
    accepted = sum(record.accepted_draft_tokens for record in records)
    assert counters["spec_decode_num_accepted_tokens_total"] == accepted
    for outcome in Outcome:
        number = sum(record.outcome is outcome for record in records)
        assert counters[f'requests_total{{outcome="{outcome}"}}'] == number
    assert counters["request_cached_tokens_count"] == counters["request_cache_hit_ratio_count"] == len(admitted)
    assert counters["request_queue_seconds_count"] == len(admitted)
    assert counters["e2e_request_latency_seconds_count"] == len(records)
    begun = sum(record.first_token_at is not None for record in records)
    assert counters["time_to_first_token_seconds_count"] == begun


def check_reported_usage(records: dict[str, UsageRecord], requests: list[SentRequest]) -> None:
    """Usage reported to a client equals its record, in its own tenant; the sums per tenant are equal."""
    reported: Counter[tuple[str, str]] = Counter()
    kept: Counter[tuple[str, str]] = Counter()
    for sent in requests:
        answer = sent.reported()
        record = records.get(sent.request_id)
        if answer.finals:
            assert record is not None and record.tenant == sent.plan.tenant
            (numbers,) = answer.finals
            assert numbers == numbers_of(record, numbers)
            for name in ("prompt", "cached", "completion"):
                reported[sent.plan.tenant, name] += getattr(numbers, name)
            kept[record.tenant, "prompt"] += record.prompt_tokens or 0
            kept[record.tenant, "cached"] += record.cached_tokens or 0
            kept[record.tenant, "completion"] += record.completion_tokens
        for numbers in (*answer.starts, *answer.running):
            assert record is not None
            # of a list of prompts only those admitted by then
            assert numbers.prompt <= (record.prompt_tokens or 0) and numbers.cached <= (record.cached_tokens or 0)
            assert numbers.completion <= record.completion_tokens
        if sent.status == 200 and record is not None and record.outcome is Outcome.FINISHED and answer.has_ended:
            assert answer.finals
    assert reported == kept


def numbers_of(record: UsageRecord, like: Numbers) -> Numbers:
    """Return the usage that a client gets for a record, with the fields that `like` has."""
    assert record.prompt_tokens is not None and record.cached_tokens is not None
    return Numbers(
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        written=None if like.written is None else record.cache_write_tokens,
        created=None if like.created is None else record.created_5m_tokens + record.created_1h_tokens,
    )


def check_log(records: dict[str, UsageRecord], lines: list[Any], counters: dict[str, float], num_requests: int) -> None:
    """One line per request with its record's numbers; the last sums of the cache equal the counters."""
    done = [line for line in lines if line["event"] == "request.done"]
    assert len(done) == num_requests
    opened = {line["request_id"]: line for line in done if line["request_id"] in records}
    assert opened.keys() == records.keys()
    for request_id, line in opened.items():
        record = records[request_id]
        reported = (line["outcome"], line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"])
        assert reported == (record.outcome, record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        miss = record.cache_misses[0] if record.cache_misses else None
        expected = (None, None) if miss is None else (miss.reason, miss.token)
        assert (line["miss_reason"], line["miss_token"]) == expected
    stats = [line for line in lines if line["event"] == "prefix_cache.stats"][-1]
    assert stats["total_prompt_tokens"] == counters["prompt_tokens_total"]
    assert stats["total_cached_tokens"] == counters["prefix_cache_hits_total"]
    assert stats["total_requests"] == counters["request_cached_tokens_count"]


def check_spans(records: dict[str, UsageRecord], tracer: KeepingTracer, num_requests: int) -> None:
    """One span per request, with or without an account, with exactly the numbers of its record."""
    spans = [dict(span.attributes or {}) for span in tracer.all_spans()]
    assert len(spans) == num_requests and tracer.num_dropped == 0
    by_id = {span["quipu.request_id"]: span for span in spans}
    assert len(by_id) == num_requests
    for request_id, span in by_id.items():
        record = records.get(request_id)
        names = ("input_tokens", "cache_read.input_tokens", "cache_creation.input_tokens", "output_tokens")
        numbers = tuple(span.get(f"gen_ai.usage.{name}") for name in names)
        if record is None:
            assert numbers == (None,) * 4
        else:
            booked = (record.prompt_tokens, record.cached_tokens, record.cache_write_tokens, record.completion_tokens)
            assert numbers == booked
