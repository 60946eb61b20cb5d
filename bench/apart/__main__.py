"""Compare engines that prefill and decode with engines for either, on a trace, and measure the transfer between two.

    python -m bench.apart --trace TRACE [--rates 1,2] [--fleets mixed,2:6] [--limit 2000] [--json]
    python -m bench.apart --real [--json]
    python -m bench.apart --quick [--real] [--json]

Eight engines in virtual time, each the real scheduler and block manager behind the real routing; the time of a step and
of a transfer is made up (`gpu_costs.py`), and printed. `mixed` engines compute prompts in chunks beside the sequences
that decode; two rows have different limits of a step's positions. The others are named by the numbers of their engines
for prefill and for decoding. Times between tokens include that between the first and the second one. A rate is how many
times as fast as in the trace requests arrive.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from bench.apart.gpu_costs import GpuCosts, LinkCosts
from bench.apart.timed_cluster import Fleet, Outcome, TimedCluster
from bench.apart.verdicts import verdicts
from bench.routing.__main__ import table
from bench.routing.cluster import RoutedJob
from bench.routing.workloads import keys_of
from bench.shapes import QWEN3_06B, TINY
from bench.trace_replay import QUICK_TRACE, TracedRequest, positive, read_trace

TRACE_BLOCK = 512
NUM_ENGINES = 8
MIXED_STEP_TOKENS = (512, 2048)
RATIOS = ((1, 7), (2, 6), (3, 5), (4, 4))
RATES = (0.5, 1.0, 2.0, 3.0)


def jobs_of(requests: Sequence[TracedRequest], block_tokens: int, rate: float) -> list[RoutedJob]:
    """Return a trace's requests, which arrive `rate` times as fast. Each of its blocks is several of `block_tokens`."""
    parts = TRACE_BLOCK // block_tokens
    known: dict[int, bytes] = {}
    jobs = []
    for request in requests:
        blocks = [hash_id * parts + part for hash_id in request.hash_ids for part in range(parts)]
        keys = keys_of(blocks[: request.num_prompt_tokens // block_tokens], known)
        jobs.append(
            RoutedJob(request.arrival_s / rate, blocks, keys, request.num_prompt_tokens, request.num_output_tokens)
        )
    return jobs


def fleets_of(names: Sequence[str], common: Fleet) -> list[Fleet]:
    """Return the fleets of these names: `mixed` stands for several."""
    fleets: list[Fleet] = []
    for name in names:
        if name == "mixed":
            fleets += [attrs.evolve(common, num_mixed=NUM_ENGINES, step_tokens=num) for num in MIXED_STEP_TOKENS]
        else:
            prefill, decode = map(positive, name.split(":"))
            fleets.append(attrs.evolve(common, num_prefill=prefill, num_decode=decode))
    return fleets


def at_quantile(ordered: Sequence[float], quantile: float) -> float | None:
    return ordered[int(quantile * (len(ordered) - 1))] if ordered else None


def row_of(fleet: Fleet, rate: float, outcome: Outcome) -> dict[str, Any]:
    def ms(ordered: Sequence[float], quantile: float) -> float | None:
        found = at_quantile(ordered, quantile)
        return None if found is None else round(1000 * found, 1)

    return {
        "rate": rate,
        "engines": fleet.name,
        "ttft_p50_ms": ms(outcome.first_s, 0.5),
        "ttft_p99_ms": ms(outcome.first_s, 0.99),
        "gap_p50_ms": ms(outcome.gaps_s, 0.5),
        "gap_p99_ms": ms(outcome.gaps_s, 0.99),
        "second_p99_ms": ms(outcome.second_s, 0.99),
        "cached": round(outcome.num_cached / outcome.num_prompt_tokens, 4),
        "apart": outcome.num_apart,
        "moved_tokens": outcome.num_moved,
        "again_tokens": outcome.num_again,
        "preempted": outcome.num_preempted,
        "busy_prefill": round(outcome.busy_prefill, 3),
        "busy_decode": round(outcome.busy_decode, 3),
    }


def simulated(
    requests: Sequence[TracedRequest], rates: Sequence[float], fleets: Sequence[Fleet]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each rate and fleet."""
    longest = max(one.num_prompt_tokens + one.num_output_tokens for one in requests)
    for rate in rates:
        for fleet in fleets:
            workload = jobs_of(requests, fleet.block_tokens, rate)
            yield row_of(fleet, rate, TimedCluster(fleet, longest).serve(workload))


def rates(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError("a rate is more than 0")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.apart", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, metavar="TRACE", help="a trace as `bench.trace_replay` reads it")
    parser.add_argument("--limit", type=positive, default=2000, help="its first LIMIT requests (default: %(default)s)")
    parser.add_argument("--rates", type=rates, default=list(RATES), metavar="X,X", help="(default: %(default)s)")
    names = ["mixed", *(f"{prefill}:{decode}" for prefill, decode in RATIOS)]
    parser.add_argument(
        "--fleets", type=lambda text: text.split(","), default=names, metavar="NAME,NAME", help="(default: %(default)s)"
    )
    parser.add_argument("--kv-tokens", type=positive, default=400_000, help="of an engine (default: %(default)s)")
    parser.add_argument("--block-tokens", type=positive, default=64, help="a divisor of 512 (default: %(default)s)")
    parser.add_argument("--local-tokens", type=int, default=256, help="as `--prefill-local-tokens` (default: 256)")
    gpu, link = GpuCosts(), LinkCosts()
    parser.add_argument("--launch-ms", type=float, default=1e3 * gpu.launch_s, help="of a step (default: %(default)g)")
    parser.add_argument(
        "--weights-ms", type=float, default=1e3 * gpu.weights_s, help="of a step (default: %(default)g)"
    )
    parser.add_argument("--token-us", type=float, default=1e6 * gpu.token_s, help="a position (default: %(default)g)")
    parser.add_argument("--context-ns", type=float, default=1e9 * gpu.context_s, help="a read (default: %(default)g)")
    parser.add_argument("--pair-ns", type=float, default=1e9 * gpu.pair_s, help="attention (default: %(default)g)")
    parser.add_argument("--kv-bytes", type=positive, default=gpu.kv_bytes, help="of a token (default: %(default)s)")
    parser.add_argument("--link-gb", type=float, default=link.bytes_per_s / 1e9, help="a second (default: %(default)g)")
    parser.add_argument("--delay-ms", type=float, default=1e3 * link.delay_s, help="of messages (default: %(default)g)")
    parser.add_argument("--real", action="store_true", help="measure two engines on two cores instead")
    parser.add_argument("--tokens", type=positive, default=1024, help="real: of a prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=7, help="real: (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="smoke test: three requests, a tiny model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    if arguments.trace is None and not (arguments.quick or arguments.real):
        parser.error("a --trace is needed, or --quick, or --real")
    if arguments.tokens % 16:
        parser.error("--tokens has to be a multiple of 16")
    if TRACE_BLOCK % arguments.block_tokens:
        parser.error(f"--block-tokens has to divide {TRACE_BLOCK}")
    return arguments


def simulate(arguments: argparse.Namespace) -> dict[str, Any]:
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)
    common = Fleet(
        kv_tokens=arguments.kv_tokens,
        block_tokens=arguments.block_tokens,
        local_tokens=arguments.local_tokens,
        gpu=GpuCosts(
            arguments.launch_ms / 1e3,
            arguments.weights_ms / 1e3,
            arguments.token_us / 1e6,
            arguments.context_ns / 1e9,
            arguments.pair_ns / 1e9,
            arguments.kv_bytes,
        ),
        link=LinkCosts(1e9 * arguments.link_gb, arguments.delay_ms / 1e3),
    )
    requests = QUICK_TRACE if arguments.quick else read_trace(arguments.trace, arguments.limit)
    fleets = fleets_of(arguments.fleets, common)
    rows = list(simulated(requests, [1.0] if arguments.quick else arguments.rates, fleets))
    return {
        "model": {**attrs.asdict(common.gpu), **attrs.asdict(common.link), "kv_tokens": common.kv_tokens},
        "requests": len(requests),
        "rows": rows,
        "verdicts": verdicts(rows),
    }


def measure_pair(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    # torch reads these once, when it loads
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ["OMP_NUM_THREADS"] = "1"
    import trio

    from bench.apart import real_pair

    num_tokens, rounds = arguments.tokens, arguments.rounds
    if arguments.quick:
        QWEN3_06B.update(TINY)
        num_tokens, rounds = 256, 1
    with contextlib.redirect_stdout(sys.stderr):  # what engines log
        return trio.run(real_pair.measure, num_tokens, rounds)


def main() -> None:
    arguments = parse()
    report: dict[str, Any] = {}
    if not arguments.real or arguments.quick:
        report |= simulate(arguments)
    if arguments.real:
        report["real"] = measure_pair(arguments)
    if arguments.json:
        print(json.dumps(report))
        return
    if "rows" in report:
        print(", ".join(f"{name} {value:g}" for name, value in report["model"].items()), end="\n\n")
        print(table(report["rows"]), *report["verdicts"], sep="\n\n")
    for row in report.get("real", ()):
        parts = ", ".join(f"{name} {value:.4g}" for name, value in list(row.items())[4:])
        print(f"{row['name']:16} {row['value']:7.3f} {row['unit']} (limit {row['limit']:g}): {parts}")


if __name__ == "__main__":
    main()
