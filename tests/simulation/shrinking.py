"""Cuts a failing plan down to the fewest arrivals and faults with which it still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulation.plan import Plan


def shrink(plan: Plan, fails: Callable[[Plan], bool], most_runs: int = 200) -> Plan:
    """Return a smaller plan for which `fails` is true, as it is for `plan`, after at most `most_runs` calls."""
    runs = 0

    def still_fails(smaller: Plan) -> bool:
        nonlocal runs
        runs += 1
        return runs <= most_runs and fails(smaller)

    def cut(numbers: Sequence[int], with_only: Callable[[Sequence[int]], Plan]) -> list[int]:
        """Leave out halves, quarters, and so on, then single ones, as long as it fails."""
        kept, size = list(numbers), max(1, len(numbers) // 2)
        while True:
            at = 0
            while at < len(kept):
                fewer = kept[:at] + kept[at + size :]
                if still_fails(with_only(fewer)):
                    kept = fewer
                else:
                    at += size
            if size == 1:
                return kept
            size //= 2

    faults = cut([fault.number for fault in plan.faults], lambda kept: plan.only(None, kept))
    plan = plan.only(None, faults)
    arrivals = cut([arrival.number for arrival in plan.arrivals], lambda kept: plan.only(kept, None))
    return plan.only(arrivals, None)


def replay_command(plan: Plan) -> str:
    """Return the command that runs a plan again."""
    arrivals = ",".join(str(arrival.number) for arrival in plan.arrivals) or "none"
    faults = ",".join(str(fault.number) for fault in plan.faults) or "none"
    return f"python -m tests.simulation --seed {plan.seed} --arrivals {arrivals} --faults {faults}"
