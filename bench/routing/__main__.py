"""Route workloads to simulated engines with each policy, and measure what a decision costs.

    python -m bench.routing [--trace TRACE] [--engines 8,64] [--policies prefix,dynamo] [--parts decisions]
                            [--conversations 40] [--json] [--quick]

Rows of `policies`: prompt tokens found in the cache, as a share of what one engine finds that is as large and as fast
as all of them; tokens computed by the busiest engine over the mean; times to first token in virtual seconds. One
engine leaves nothing to choose and has one row. Rows of `faults`: the same policy with a network between, with an
engine that is slower than the others, and with one that dies; shares are of what it finds and computes without. Rows
of `decisions`: microseconds a decision, beside a plain port of NVIDIA Dynamo's index and cost. bench/README.md has the
tables.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.routing import decisions
from bench.routing.cluster import FINE, MAX_NUM_SEQS, PREFILL_BUDGET, Cluster, Conditions, Outcome, RoutedJob
from bench.routing.workloads import MADE_BLOCK, TRACE_BLOCK, made, traced
from bench.simulated import PassCosts
from bench.trace_replay import QUICK_TRACE, positive, read_trace
from quipu.actors.router.policies import POLICIES
from quipu.actors.router.routing import Routing

PARTS = ("policies", "faults", "decisions")
TRACE_POOLS = (8000, 20_000, 50_000)
TRACE_ENGINES = (1, 2, 8, 64)
MADE_ENGINES = (1, 2, 8, 64, 1000)
MADE_POOL = 1500
"""Blocks of an engine."""
CONVERSATIONS = 160
"""For each engine: they fill its cache more than twice."""
CONVERSATIONS_OF_MANY = 16
"""The same where there are more than `MANY`, so that a run takes no longer."""
MANY = 64
PER_SECOND = 0.25
"""Conversations that begin on each engine."""
NUM_DECISIONS = 300
FAULT_ENGINES = 8
CONDITIONS = {
    "fine": FINE,
    "delay 1 ms": Conditions(delay_s=0.001),
    "delay 20 ms": Conditions(delay_s=0.02),
    "one half as fast": Conditions(slowness=2.0),
    "one dies": Conditions(dies_at=0.5),
    "one dies, delay 20 ms": Conditions(delay_s=0.02, dies_at=0.5),
}
"""What the rows of `faults` are made under. Delays are one-way."""


def serve(
    workload: Sequence[RoutedJob],
    num_engines: int,
    pool: int,
    block_size: int,
    policy: str,
    costs: PassCosts,
    max_num_seqs: int = MAX_NUM_SEQS,
    conditions: Conditions = FINE,
) -> Outcome:
    routing = Routing(policy, block_size=block_size, prefill_budget=PREFILL_BUDGET, seed=1)
    return Cluster(routing, num_engines, pool, block_size, costs, max_num_seqs, conditions).serve(workload)


def rows_of(
    name: str,
    workload: Sequence[RoutedJob],
    num_engines: int,
    pool: int,
    block_size: int,
    policies: Sequence[str],
    costs: PassCosts,
) -> Iterator[dict[str, Any]]:
    # one engine that is as fast as all of them together
    fast = PassCosts(costs.step_s / num_engines, costs.token_s / num_engines)
    alone = serve(workload, 1, pool, block_size, "prefix", fast, MAX_NUM_SEQS * num_engines)
    for policy in policies if num_engines > 1 else ("any",):
        outcome = serve(workload, num_engines, pool, block_size, policy, costs) if num_engines > 1 else alone
        yield {
            "workload": name,
            "requests": len(workload),
            "engines": num_engines,
            "blocks": pool,
            "policy": policy,
            "hits_of_one": round(outcome.hit_tokens / max(1, alone.hit_tokens), 4),
            "busiest": round(outcome.imbalance, 3),
            "ttft_p50_s": round(outcome.wait_s(0.5), 3),
            "ttft_p99_s": round(outcome.wait_s(0.99), 3),
            "estimates_off": outcome.estimates_off,
            "decision_us": round(outcome.decision_us, 1),
        }


def policy_rows(arguments: argparse.Namespace, costs: PassCosts) -> Iterator[dict[str, Any]]:
    """Yield a row for each workload, number of engines, size of the pool and policy."""
    if arguments.trace is not None or arguments.quick:
        requests = QUICK_TRACE if arguments.quick else read_trace(arguments.trace, arguments.limit)
        workload = traced(requests)
        longest = max(-(-one.num_prompt_tokens // TRACE_BLOCK) + 2 for one in workload)
        for pool in (100,) if arguments.quick else TRACE_POOLS:
            for num_engines in arguments.engines or TRACE_ENGINES:
                if pool // num_engines > longest:  # the longest prompt has to fit
                    yield from rows_of("trace", workload, num_engines, pool, TRACE_BLOCK, arguments.policies, costs)
    for num_engines in arguments.engines or MADE_ENGINES:
        number = CONVERSATIONS if num_engines <= MANY else CONVERSATIONS_OF_MANY
        workload = made((arguments.conversations or number) * num_engines, PER_SECOND * num_engines)
        pool = MADE_POOL * num_engines
        yield from rows_of("made", workload, num_engines, pool, MADE_BLOCK, arguments.policies, costs)


def fault_rows(arguments: argparse.Namespace, costs: PassCosts) -> Iterator[dict[str, Any]]:
    """Yield a row for each thing that may go wrong and each policy. Shares are of the same policy without it."""
    num_engines = (arguments.engines or [FAULT_ENGINES])[0]
    workload = made((arguments.conversations or CONVERSATIONS) * num_engines, PER_SECOND * num_engines)
    for policy in arguments.policies:
        fine: Outcome | None = None
        for name, conditions in CONDITIONS.items():
            outcome = serve(
                workload, num_engines, MADE_POOL * num_engines, MADE_BLOCK, policy, costs, conditions=conditions
            )
            fine = fine or outcome
            yield {
                "conditions": name,
                "engines": num_engines,
                "policy": policy,
                "hits": round(outcome.hit_tokens / max(1, fine.hit_tokens), 4),
                "computed": round(sum(outcome.computed) / max(1, sum(fine.computed)), 3),
                "ttft_p50_s": round(outcome.wait_s(0.5), 3),
                "ttft_p99_s": round(outcome.wait_s(0.99), 3),
                "moved": outcome.num_moved,
                "estimates_off": outcome.estimates_off,
            }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows)])


def numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return what reads some of the known names, separated by commas."""

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return text.split(",")

    return names


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, metavar="TRACE", help="a trace as `bench.trace_replay` reads it")
    parser.add_argument("--limit", type=positive, help="route only the first LIMIT requests of the trace")
    parser.add_argument("--engines", type=numbers, metavar="N,N", help="numbers of engines (default: several)")
    parser.add_argument("--policies", type=names_of(POLICIES), default=list(POLICIES), metavar="NAME,NAME")
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), metavar="NAME,NAME")
    parser.add_argument(
        "--conversations", type=positive, metavar="N", help="made up for each engine (default: by engines)"
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="virtual time of a pass (default: %(default)s)")
    parser.add_argument("--token-us", type=float, default=20.0, help="virtual time per position (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="smoke test: two engines and a few requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.engines, arguments.conversations = [2], 2
    report: dict[str, Any] = {}
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)
    costs = PassCosts(arguments.step_ms / 1000, arguments.token_us / 1e6)
    if "policies" in arguments.parts:
        report["policies"] = list(policy_rows(arguments, costs))
    if "faults" in arguments.parts:
        report["faults"] = list(fault_rows(arguments, costs))
    if "decisions" in arguments.parts:
        sizes, number = (decisions.QUICK, 3) if arguments.quick else (decisions.SIZES, NUM_DECISIONS)
        report["decisions"] = [decisions.measure(size, number) for size in sizes]
        report["bytes_of_an_entry"] = decisions.bytes_of_an_entry(1000 if arguments.quick else 100_000)
    if arguments.json:
        print(json.dumps(report))
        return
    for rows in report.values():
        print(table(rows) if isinstance(rows, list) else f"bytes of an entry: {rows}", end="\n\n")


if __name__ == "__main__":
    main()
