"""Compare two checkouts of quipu: whether a change made anything slower.

    python -m bench.commits BEFORE [--runs 7] [--json] [--quick]

BEFORE is a checkout of the older commit with its C module built. It and this checkout alternate in running
`bench.engine_core`, `bench.sse` and `bench.execution`, `--runs` times each, with the settings in `JOBS`. Medians are
compared row by row. A row is slower if its ratio is below 0.98 and the difference exceeds the older commit's spread
against itself (the medians of every other run).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).resolve().parent.parent
JOBS = {
    "engine_core": ["--rounds", "1", "--steps", "100"],
    "sse": ["--streams", "1", "64", "256", "--seconds", "1", "--rounds", "1"],
    "execution": ["--layers", "2", "--rounds", "2"],
}
LEAST_RATIO = 0.98

Rates = dict[str, float]
"""Work per unit of time, by row: higher is better."""


@attrs.frozen
class Compared:
    row: str
    before: float
    after: float
    ratio: float
    """Ratio of the medians, after to before; above 1 is faster."""
    spread: float
    """The ratio of the medians of every other run of the older commit, at least 1."""

    @property
    def is_slower(self) -> bool:
        return self.ratio < LEAST_RATIO and self.ratio * self.spread < 1


def read_rates(job: str, report: dict[str, Any]) -> Rates:
    """Return the rows of a benchmark's JSON report as rates."""
    rows = report["rows"]
    match job:
        case "engine_core":
            return {f"engine_core {row['name']}": 1e6 / row["quipu_us"] for row in rows}
        case "sse":
            return {
                f"sse {row['streams']} {'text' if row['detokenize'] else 'plain'}": row["quipu_events_per_s"]
                for row in rows
            }
        case _:
            return {f"execution {row['name']}": row["value"] for row in rows}


def run(job: str, checkout: Path, arguments: list[str]) -> Rates:
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{checkout}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", f"bench.{job}", "--json", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE)
    return read_rates(job, json.loads(done.stdout))


def compare(before: list[Rates], after: list[Rates]) -> list[Compared]:
    compared = []
    for row in before[0]:
        old = [rates[row] for rates in before]
        new = [rates[row] for rates in after]
        halves = [statistics.median(old[0::2]), statistics.median(old[1::2] or old)]
        ratio = statistics.median(new) / statistics.median(old)
        compared.append(Compared(row, statistics.median(old), statistics.median(new), ratio, max(halves) / min(halves)))
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.commits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, nargs="?", default=HERE, help="(default: this checkout, against itself)")
    parser.add_argument("--runs", type=int, default=7, help="runs per commit (default: %(default)s)")
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: one short run of each")
    arguments = parser.parse_args()
    compared: list[Compared] = []
    for job in arguments.jobs:
        settings = ["--quick"] if arguments.quick else JOBS[job]
        before: list[Rates] = []
        after: list[Rates] = []
        for _ in range(1 if arguments.quick else arguments.runs):
            before.append(run(job, arguments.before.resolve(), settings))
            after.append(run(job, HERE, settings))
        compared += compare(before, after)
    if arguments.json:
        print(json.dumps({"rows": [{**attrs.asdict(row), "is_slower": row.is_slower} for row in compared]}))
    else:
        print(f"{'':<60} {'before':>12} {'after':>12} {'ratio':>6} {'spread':>6}")
        for row in compared:
            verdict = "  slower" if row.is_slower else ""
            print(f"{row.row:<60} {row.before:>12.1f} {row.after:>12.1f} {row.ratio:>6.3f} {row.spread:>6.3f}{verdict}")
    sys.exit(any(row.is_slower for row in compared) and not arguments.quick)


if __name__ == "__main__":
    main()
