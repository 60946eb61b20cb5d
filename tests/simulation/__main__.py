"""Tries to prove that the server is wrong: `python -m tests.simulation --seed 7`, or `--seeds 0:500`.

Each seed draws a server, clients and faults, and runs them in virtual time; an oracle judges what was seen. A seed that
fails is cut down to the fewest arrivals and faults, and the command that replays it is printed. The exit status is 1 if
any seed fails. docs/internals/simulation.md says what is covered.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count

from tests.simulation.outcome import Coverage, Outcome, run_and_judge, run_seeds
from tests.simulation.plan import Plan, draw_plan
from tests.simulation.shrinking import replay_command, shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="run this seed")
    parser.add_argument("--seeds", help="run seeds from A to B - 1, as A:B")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each seed, and one at the end")
    parser.add_argument("--arrivals", help="only these arrivals of the seed, by number: 0,3")
    parser.add_argument("--faults", help="only these faults of the seed: 1,2, or none")
    parser.add_argument("--plan", action="store_true", help="also print what the seed has drawn")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with further seeds for so long")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    parser.add_argument("--no-shrink", action="store_true", help="do not cut failing seeds down")
    parser.add_argument("--until-wrong", action="store_true", help="stop at the first seed that fails")
    options = parser.parse_args()
    if options.seed is not None:
        return _run_one(options)
    return _run_many(options)


def _numbers(text: str | None) -> Sequence[int] | None:
    return None if text is None else [] if text == "none" else [int(number) for number in text.split(",")]


def _run_one(options: argparse.Namespace) -> int:
    plan = draw_plan(options.seed).only(_numbers(options.arrivals), _numbers(options.faults))
    if options.plan:
        _print_plan(plan)
    outcome = run_and_judge(plan)
    _print(outcome, as_json=options.json)
    if outcome.violations and not options.no_shrink:
        _print_smallest(plan)
    return bool(outcome.violations)


def _run_many(options: argparse.Namespace) -> int:
    first, _, end = (options.seeds or "0:500").partition(":")
    began, coverage, failed, num_seeds = time.monotonic(), Coverage(), [], 0
    for outcome in _outcomes(int(first), int(end), options.minutes, options.jobs):
        num_seeds += 1
        coverage.add(outcome)
        if outcome.violations:
            failed.append(outcome.seed)
        if options.json or outcome.violations:
            _print(outcome, as_json=options.json)
        if outcome.violations and not options.no_shrink:
            _print_smallest(draw_plan(outcome.seed))
        if outcome.violations and options.until_wrong:
            break
    seconds = round(time.monotonic() - began, 1)
    summary = {"seeds": num_seeds, "failed": failed, "seconds": seconds, "fault_points": coverage.shown()}
    if options.json:
        print(json.dumps(summary))
    else:
        points = coverage.shown()
        print(f"{num_seeds} seeds in {seconds:g} s: {len(failed)} failed {failed or ''}")
        print(f"crashes at {points['hit']} of {points['points']} points; never at:")
        print("\n".join(f"  {point}" for point in points["never_hit"]) or "  none")
    return bool(failed)


def _outcomes(first: int, end: int, minutes: float, jobs: int) -> Iterator[Outcome]:
    """Run the seeds, and then as many again as often as there is time."""
    until = time.monotonic() + 60 * minutes
    for turn in count():
        shift = turn * (end - first)
        yield from run_seeds(range(first + shift, end + shift), jobs)
        if time.monotonic() >= until:
            return


def _print(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(outcome.shown()), flush=True)
        return
    print(f"seed {outcome.seed}: {outcome.num_messages} messages in {outcome.virtual_s:.3f} virtual seconds, trace")
    print(f"  {outcome.trace_sha256}")
    for fault in outcome.faults:
        print(f"  fault {fault}")
    for violation in outcome.violations:
        print(f"  WRONG {violation}")


def _print_plan(plan: Plan) -> None:
    print(plan.setup)
    for drawn in (*plan.arrivals, *map(str, plan.faults)):
        print(f"  {drawn}")


def _print_smallest(plan: Plan) -> None:
    rule = _rules(run_and_judge(plan))
    smallest = shrink(plan, lambda smaller: bool(rule & _rules(run_and_judge(smaller))))
    print(f"  replay: {replay_command(smallest)}", file=sys.stderr, flush=True)


def _rules(outcome: Outcome) -> set[str]:
    return {violation.partition(":")[0] for violation in outcome.violations}


if __name__ == "__main__":
    sys.exit(main())
