"""How many seeds the oracle needs to notice a planted fault: `python -m tests.simulation.mutants [SLUG ...]`.

Each `tests/mutants/sim_*.patch` plants a fault that leaves the server running. Seeds are run in a copy of the
repository with the fault, from 0 on, until one is judged wrong. Prints a row of docs/internals/simulation.md for each;
exits with 1 if a fault goes unnoticed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from scripts.mutants import ROOT, copy_of_repository

MOST_SEEDS = 500
LIMIT_S = 300
PREFIX = "sim_"


@attrs.frozen
class Noticed:
    slug: str
    seed: int | None
    """None: no seed has shown it."""
    rule: str

    @property
    def row(self) -> str:
        seeds = "none" if self.seed is None else str(self.seed + 1)
        return f"| `{PREFIX}{self.slug}` | {seeds} | {self.rule} |"


def try_mutant(patch: Path) -> Noticed:
    slug = patch.stem.removeprefix(PREFIX)
    with copy_of_repository() as copy:
        ceiling = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
        applied = subprocess.run(["git", "apply", str(patch)], cwd=copy, env=ceiling, capture_output=True, check=False)
        if applied.returncode:
            return Noticed(slug, None, "the patch does not apply")
        command = [sys.executable, "-m", "tests.simulation", "--seeds", f"0:{MOST_SEEDS}", "--json", "--jobs", "1"]
        paths = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            run = subprocess.run(
                [*command, "--no-shrink", "--until-wrong"],
                cwd=copy,
                env=paths,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Noticed(slug, None, f"nothing within {LIMIT_S} s")
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    wrong = [outcome for outcome in outcomes if outcome.get("violations")]
    if not wrong:
        return Noticed(slug, None, run.stderr.strip().rpartition("\n")[2])
    return Noticed(slug, wrong[0]["seed"], wrong[0]["violations"][0].partition(":")[0])


def main(slugs: list[str]) -> int:
    patches = sorted((ROOT / "tests" / "mutants").glob(f"{PREFIX}*.patch"))
    wanted = [patch for patch in patches if not slugs or patch.stem.removeprefix(PREFIX) in slugs]
    missed = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for noticed in pool.map(try_mutant, wanted):
            print(noticed.row, flush=True)
            missed += noticed.seed is None
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
