"""`quipu bench latency` and `quipu bench throughput`: an engine without a server, from flags to report.

Standard output gets the report and nothing else. Exit codes: 0 if every request was completed, 1 if one was not or the
engine could not be started, 2 for invalid flags and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import numpy as np

import quipu
from quipu.actors.fleet.supervisor import EngineGivenUp
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.shared.error_groups import first_leaf

from ...telemetry import logs
from ..command_output import EXIT_FAILED, EXIT_USAGE, complain, indented
from ..command_progress import command_progress
from .answer import Outcome
from .datasets import DEFAULT_NUM_PROMPTS, make_wording, make_workload
from .engine import Engine, open_engine
from .load_generator import calm_collector, run_load
from .offline_arguments import Offline, parse_offline
from .prompts import TokenRange, draw_ids
from .report import summarize
from .workload import Ask, WorkloadError

PERCENTILES = (10, 25, 50, 75, 90, 99)
"""The percentiles that `vllm bench latency` reports."""


class RequestFailed(Exception):
    """A request of a batch was not completed, so the batch's time is meaningless."""


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `bench`. Returns the exit code."""
    asked = parse_offline(argv)
    logs.configure(asked.serve.log_level)
    measure = measure_latency if asked.bench.command == "latency" else measure_throughput
    code = 0
    try:
        report = anyio.run(measure, asked, backend="trio")
    except* (CheckpointError, WorkloadError) as group:
        code = complain(first_leaf(group), EXIT_USAGE)
    except* (EngineGivenUp, RequestFailed) as group:
        code = complain(first_leaf(group), EXIT_FAILED)
    if code:
        return code
    if asked.bench.output_json is not None:
        asked.bench.output_json.write_bytes(indented(report))
    _print(report, as_json=asked.bench.json)
    return EXIT_FAILED if report.get("failed") else 0


async def measure_latency(asked: Offline) -> dict[str, Any]:
    """Run one batch after another, each with new prompts. Raises RequestFailed."""
    bench = asked.bench
    async with open_engine(asked.serve, bench.temperature, num_open=bench.batch_size) as engine:
        tokens = TokenRange.of_vocabulary(engine.runtime.desk.info.vocab_size)
        latencies_s = []
        num_iters = bench.num_iters_warmup + bench.num_iters
        is_off = bench.disable_tqdm or bench.json
        with calm_collector(), command_progress("batches", num_iters, "batches", is_off=is_off) as count:
            for number in range(num_iters):
                prompts = [
                    draw_ids(tokens, bench.input_len, bench.seed, number, row) for row in range(bench.batch_size)
                ]
                batch = [Ask({"prompt": prompt, "max_tokens": bench.output_len}) for prompt in prompts]
                took_s = await time_batch(engine, batch)
                if number >= bench.num_iters_warmup:
                    latencies_s.append(took_s)
                count(1)
        return describe(asked, engine) | summarize_latencies(latencies_s, bench.batch_size, bench.output_len)


async def time_batch(engine: Engine, batch: Sequence[Ask]) -> float:
    """Return the seconds until the last request has ended. Raises RequestFailed."""
    outcomes: list[Outcome] = []

    async def ask(one: Ask) -> None:
        outcomes.append(await engine.ask(one))

    began_s = anyio.current_time()
    async with anyio.create_task_group() as asking:
        for one in batch:
            asking.start_soon(ask, one)
    took_s = anyio.current_time() - began_s
    for outcome in outcomes:
        if outcome.failure is not None:
            raise RequestFailed(f"a request failed: {outcome.failure.kind}: {outcome.failure.message}")
    return took_s


def summarize_latencies(latencies_s: Sequence[float], batch_size: int, output_len: int) -> dict[str, Any]:
    """Return the results under the names of `vllm bench latency`, in seconds."""
    average = float(np.mean(latencies_s))
    return {
        "avg_latency": average,
        "latencies": list(latencies_s),
        "percentiles": {str(p): float(np.percentile(latencies_s, p)) for p in PERCENTILES},
        "output_tokens_per_second": batch_size * output_len / average,
    }


async def measure_throughput(asked: Offline) -> dict[str, Any]:
    """Send the whole dataset at once. Raises WorkloadError."""
    bench = asked.bench
    num_open = bench.num_prompts or DEFAULT_NUM_PROMPTS
    async with open_engine(asked.serve, bench.temperature, num_open=num_open) as engine:
        wording = make_wording(bench, engine.runtime.desk.info.vocab_size)
        workload = make_workload(bench, wording)
        all_at_once = [0.0] * workload.num_conversations
        is_off = bench.disable_tqdm or bench.json
        with calm_collector(), command_progress("requests", workload.num_asks, "requests", is_off=is_off) as count:
            result = await run_load(workload, engine.ask, all_at_once, on_ended=count)
        summary = summarize(result, metrics=("ttft", "tpot"), percentiles=(50.0, 99.0))
        return describe(asked, engine) | describe_throughput(summary)


def describe_throughput(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the results under the names of `vllm bench throughput` and our own."""
    inputs, outputs = summary["total_input_tokens"], summary["total_output_tokens"]
    return {
        "elapsed_time": summary["duration"],
        "num_requests": summary["completed"],
        "total_num_tokens": inputs + outputs if inputs is not None and outputs is not None else None,
        "requests_per_second": summary["request_throughput"],
        "tokens_per_second": summary["total_token_throughput"],
        "output_tokens_per_second": summary["output_throughput"],
        **{name: summary[name] for name in summary if name.startswith(("total_", "mean_", "p50_", "p99_"))},
        "failed": summary["failed"] + summary["skipped"],
        "errors": summary["errors"],
    }


def describe(asked: Offline, engine: Engine) -> dict[str, Any]:
    """Return what was measured: the flags, and the engine as it describes itself."""
    flags = {name: value for name, value in vars(asked.bench).items() if isinstance(value, int | float | str)}
    info = engine.runtime.desk.info
    ran = {} if info.engine is None else attrs.asdict(info.engine)
    ran.pop("incarnation", None)
    settings = {name: value for name, value in info.settings.items() if name not in ("data_dir", *ran)}
    return {"quipu_version": quipu.__version__, **flags, "engine": ran | settings}


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        text = indented(report).decode().rstrip()
    elif "avg_latency" in report:
        spread = ", ".join(f"p{p} {seconds:.4f}" for p, seconds in report["percentiles"].items())
        text = (
            f"{report['batch_size']} x ({report['input_len']} in, {report['output_len']} out): "
            f"{report['avg_latency']:.4f} s on average ({spread}), "
            f"{report['output_tokens_per_second']:.1f} output tokens a second"
        )
    else:
        text = (
            f"{report['num_requests']} requests in {report['elapsed_time']:.2f} s: "
            f"{report['requests_per_second']:.2f} requests, {report['tokens_per_second']:.1f} tokens and "
            f"{report['output_tokens_per_second']:.1f} output tokens a second"
        )
        for error in report["errors"]:
            text += f"\nfailed: {error['count']} x {error['kind']}: {error['example']}"
    print(text, flush=True)
