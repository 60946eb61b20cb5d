"""vLLM's names of metrics stand beside ours, with the same labels and values, if they are asked for."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from quipu.web.telemetry.metric_names import NAMES
from tests.runtimes import small_runtime
from tests.traps.wire import over_http
from tests.web.asgi_client import Client

DASHBOARD = [
    "e2e_request_latency_seconds",
    "generation_tokens",
    "inter_token_latency_seconds",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success",
    "time_to_first_token_seconds",
]
"""What vLLM's own Grafana dashboard (examples/observability/prometheus_grafana) asks for."""


async def families(client: Client) -> dict[str, Metric]:
    async with client.open("GET", "/metrics") as exchange:
        await exchange.wait_started()
        return {family.name: family for family in text_string_to_metric_families((await exchange.read()).decode())}


async def test_names_of_vllm() -> None:
    """Each metric of the table is there twice, with the same type, text and samples; no other has two names."""
    async with small_runtime() as runtime:
        await over_http(runtime).post("/v1/completions", {"prompt": [7] * 40, "max_tokens": 3, "ignore_eos": True})
        found = await families(over_http(runtime, shows_vllm_metrics=True))
        theirs = {name: family for name, family in found.items() if name.startswith("vllm:")}
        assert set(theirs) == {f"vllm:{name.removesuffix('_total')}" for name in NAMES.values()}
        for ours, name in NAMES.items():
            one, other = found[f"quipu:{ours.removesuffix('_total')}"], theirs[f"vllm:{name.removesuffix('_total')}"]
            assert (one.type, one.documentation) == (other.type, other.documentation)
            assert [(sample.labels, sample.value) for sample in one.samples] == [
                (sample.labels, sample.value) for sample in other.samples
            ]
            assert one.samples or "per_pos" in ours, ours
        assert found["vllm:prompt_tokens"].samples[0].value == 40
        by_reason = {sample.labels["finished_reason"]: sample.value for sample in found["vllm:request_success"].samples}
        assert by_reason == {"stop": 0, "length": 1, "abort": 0, "error": 0}
        assert not {f"vllm:{name}" for name in DASHBOARD} - set(theirs)
        assert not any(name.startswith("vllm:") for name in await families(over_http(runtime)))
