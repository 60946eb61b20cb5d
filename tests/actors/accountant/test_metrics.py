"""The metrics: documented names, kinds and labels, and the meaning of each."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from quipu.actors.accountant.metrics import Metrics
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.messages.outcomes import Outcome
from quipu.kernels.fake import Dials
from tests.journals import KeptJournal
from tests.runtimes import BLOCK, Answer, Client, small_runtime
from tests.traps.wire import prompt_of, samples, settle

MODEL = {"model_name"}
LISTED: dict[str, tuple[str, set[str]]] = {
    "quipu:prompt_tokens_total": ("counter", MODEL),
    "quipu:cached_tokens_total": ("counter", MODEL | {"tier"}),
    "quipu:generation_tokens_total": ("counter", MODEL),
    "quipu:prefix_cache_queries_total": ("counter", MODEL),
    "quipu:prefix_cache_hits_total": ("counter", MODEL),
    "quipu:recomputed_tokens_total": ("counter", MODEL),
    "quipu:moved_tokens_total": ("counter", MODEL),
    "quipu:spec_decode_num_drafts_total": ("counter", MODEL),
    "quipu:spec_decode_num_draft_tokens_total": ("counter", MODEL),
    "quipu:spec_decode_num_accepted_tokens_total": ("counter", MODEL),
    "quipu:usage_disputed_total": ("counter", MODEL),
    "quipu:requests_total": ("counter", MODEL | {"outcome"}),
    "quipu:requests_ended_total": ("counter", MODEL | {"finished_reason"}),
    "quipu:request_cached_tokens": ("histogram", MODEL),
    "quipu:request_prompt_tokens": ("histogram", MODEL),
    "quipu:request_generation_tokens": ("histogram", MODEL),
    "quipu:request_max_num_generation_tokens": ("histogram", MODEL),
    "quipu:request_prefill_seconds": ("histogram", MODEL),
    "quipu:request_decode_seconds": ("histogram", MODEL),
    "quipu:request_cache_hit_ratio": ("histogram", MODEL),
    "quipu:time_to_first_token_seconds": ("histogram", MODEL),
    "quipu:inter_token_latency_seconds": ("histogram", MODEL),
    "quipu:request_queue_seconds": ("histogram", MODEL),
    "quipu:e2e_request_latency_seconds": ("histogram", MODEL),
    "quipu:open_accounts": ("gauge", MODEL),
    "quipu:num_requests_running": ("gauge", MODEL),
    "quipu:num_requests_waiting": ("gauge", MODEL),
    "quipu:kv_blocks": ("gauge", MODEL | {"state"}),
    "quipu:kv_cache_usage_ratio": ("gauge", MODEL),
}
"""The kind and the labels of each metric of usage and load, by name."""
VALUES = {
    "outcome": {"finished", "failed", "cancelled", "rejected"},
    "finished_reason": {"stop", "length", "abort", "error"},
    "tier": {"device", "host", "disk", "remote", "unattributed"},
}


def families(client: Client) -> dict[str, Metric]:
    text = client.runtime.desk.render_metrics().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        found[family.name + "_total" if family.type == "counter" else family.name] = family
    return found


async def test_every_documented_metric_exists(autojump_clock: trio.abc.Clock) -> None:
    """Each metric exists before the first request, with its kind, help and labels, and counters are 0."""
    async with small_runtime() as client:
        found = families(client)
    for name, (kind, labels) in LISTED.items():
        family = found[name]
        assert family.type == kind and family.documentation
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            assert set(sample.labels) - {"le"} == labels, name
            assert sample.labels["model_name"] == "demo"
            if kind != "gauge":
                assert sample.value == 0
        for label, values in VALUES.items():
            if label in labels:
                assert {sample.labels[label] for sample in family.samples} == values


async def test_roles_of_engines(autojump_clock: trio.abc.Clock) -> None:
    """Each engine is shown with its role, which may be changed while it serves."""
    roles = (EngineRole.PREFILL, EngineRole.DECODE)
    async with small_runtime(num_engines=2, engine_roles=roles) as client:

        def shown() -> set[tuple[str, str]]:
            return {
                (sample.labels["engine"], sample.labels["role"])
                for sample in families(client)["quipu:engine_role"].samples
                if sample.value == 1
            }

        assert shown() == {("0", "prefill"), ("1", "decode")}
        client.runtime.desk.control.set_role(1, EngineRole.MIXED)
        assert shown() == {("0", "prefill"), ("1", "mixed")}


async def test_gauges_of_a_running_engine(autojump_clock: trio.abc.Clock) -> None:
    """Running and waiting sequences are shown, and every block is in exactly one state."""
    async with small_runtime(max_num_seqs=2) as client:
        seen: list[dict[str, float]] = []

        async def watch() -> None:
            while True:
                seen.append(samples(client))
                await trio.sleep(0.003)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            async with trio.open_nursery() as asking:
                for seed in range(3):
                    asking.start_soon(client.ask, prompt_of(40, seed))
            nursery.cancel_scope.cancel()
        await settle(client)
        at_rest = samples(client)
    assert max(s["open_accounts"] for s in seen) == 3
    assert max(s["num_requests_running"] for s in seen) == 2
    assert max(s["num_requests_waiting"] for s in seen) == 1
    for sample in (*seen, at_rest):
        states = {name: value for name, value in sample.items() if name.startswith("kv_blocks{")}
        assert sum(states.values()) == 63
        assert min(states.values()) >= 0
        assert sample["kv_cache_usage_ratio"] == pytest.approx(sample['kv_blocks{state="used"}'] / 63)
    assert max(sample['kv_blocks{state="used"}'] for sample in seen) == 2 * 3
    assert at_rest["open_accounts"] == at_rest["num_requests_running"] == at_rest["num_requests_waiting"] == 0
    assert at_rest['kv_blocks{state="used"}'] == 0 < at_rest['kv_blocks{state="cached"}']


async def run_three(client: Client) -> list[Answer]:
    """Run one request that misses, one that hits two blocks, and one with two choices."""
    prompt = prompt_of(40)
    first = await client.ask(prompt, max_tokens=5)
    second = await client.ask([*prompt[: 2 * BLOCK], *prompt_of(9, 1)], max_tokens=3)
    return [first, second, await client.ask(prompt_of(20, 2), n=2, max_tokens=4)]


async def test_histograms_match_the_records(autojump_clock: trio.abc.Clock) -> None:
    """Each request is counted once in each histogram, with the times and counts of its record."""
    async with small_runtime(Dials(step_seconds=0.01)) as client:
        records = [answer.record for answer in await run_three(client)]
        found = samples(client)

    def check(name: str, values: list[float]) -> None:
        assert found[f"{name}_count"] == len(values)
        assert found[f"{name}_sum"] == pytest.approx(
            sum(values), abs=1e-5
        )  # Unix times as floats are exact to a quarter of a microsecond
        buckets = [value for sample, value in found.items() if sample.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == len(values)

    def times(later: str, earlier: str = "received_at") -> list[float]:
        return [getattr(record, later) - getattr(record, earlier) for record in records]

    check("request_cached_tokens", [0, 2 * BLOCK, 0])
    check("request_cache_hit_ratio", [0, 2 * BLOCK / (2 * BLOCK + 9), 0])
    check("request_queue_seconds", times("admitted_at"))
    check("time_to_first_token_seconds", times("first_token_at"))
    check("e2e_request_latency_seconds", times("closed_at"))
    check("request_prefill_seconds", times("first_token_at", "admitted_at"))
    check("request_decode_seconds", times("closed_at", "first_token_at"))
    check("request_prompt_tokens", [40, 2 * BLOCK + 9, 20])
    check("request_generation_tokens", [5, 3, 8])
    check("request_max_num_generation_tokens", [5, 3, 4])
    assert found['requests_ended_total{finished_reason="length"}'] == 3
    # one token per step; the first token of each sequence follows none
    assert found["inter_token_latency_seconds_count"] == 4 + 2 + 2 * 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.01 * (4 + 2 + 2 * 3))


async def test_steps_are_counted(autojump_clock: trio.abc.Clock) -> None:
    """Each step is counted once, however many requests it serves: a prompt in one chunk takes one step per token."""
    async with small_runtime(Dials(step_seconds=0.01)) as client:
        before = samples(client)["engine_steps_total"]
        await client.ask(prompt_of(20), max_tokens=5)
        await settle(client)
        one = samples(client)["engine_steps_total"] - before
        await client.ask(prompt_of(20, 1), max_tokens=5, n=2)
        await settle(client)
        two = samples(client)["engine_steps_total"] - before - one
    assert 5 <= one <= 7 and 5 <= two <= 8  # with steps that only free blocks


async def test_counters_of_unsuccessful_requests(autojump_clock: trio.abc.Clock) -> None:
    """Rejected, cancelled and failed requests are counted by outcome; those never admitted are in no sum or ratio."""
    dials, journal = Dials(step_seconds=0.01), KeptJournal()
    async with small_runtime(dials, journal=journal, max_model_len=100) as client:
        await client.ask(prompt_of(100))  # does not fit into the cache
        dials.fail_steps = 2
        await client.ask(prompt_of(40))
        ticket = client.open(prompt_of(50, 1), max_tokens=50)
        await ticket.start()
        await trio.sleep(0.045)
        ticket.leave()
        await settle(client)
        found = samples(client)
    left = journal.closed[-1]
    assert [record.outcome for record in journal.closed] == [Outcome.REJECTED, Outcome.FAILED, Outcome.CANCELLED]
    for outcome, number in {"finished": 0, "failed": 1, "cancelled": 1, "rejected": 1}.items():
        assert found[f'requests_total{{outcome="{outcome}"}}'] == number
    assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"] == 50
    assert found["generation_tokens_total"] == left.completion_tokens > 0
    once: list[Any] = ["request_cached_tokens", "request_cache_hit_ratio", "request_queue_seconds"]
    assert [found[f"{name}_count"] for name in once] == [1, 1, 1]
    assert found["e2e_request_latency_seconds_count"] == 3
    for reason, number in {"stop": 0, "length": 0, "abort": 1, "error": 1}.items():
        assert found[f'requests_ended_total{{finished_reason="{reason}"}}'] == number
    assert found["request_prompt_tokens_sum"] == 50
    assert found["usage_disputed_total"] == 0


def test_only_upstreams_are_shown_as_ready() -> None:
    """Engines have no `quipu:upstream_ready`, which an alert would otherwise take for an upstream that is down."""
    metrics = Metrics("demo")
    assert b"upstream_ready{" not in metrics.render()
    metrics.add_upstream(1)
    metrics.set_upstream(1, is_ready=True, num_running=0)
    shown = [line for line in metrics.render().splitlines() if line.startswith(b"quipu:upstream_ready{")]
    assert shown == [b'quipu:upstream_ready{engine="1",model_name="demo"} 1.0']
