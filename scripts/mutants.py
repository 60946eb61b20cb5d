"""Check that each known fault, planted in a copy of the repository, is caught by its test: `make mutants`.

`tests/mutants/SLUG.patch` plants one fault in the product's code; `test_SLUG.py`, in `tests/traps/` or `tests/tools/`,
must fail with it and pass without it. Prints one line per mutant; exits with 1 if a mutant survives, a patch does not
apply, or one of the two files is missing. Arguments name the slugs to run; the default is all.

To make a patch: plant the fault, run `git diff -U1 > tests/mutants/SLUG.patch`, and revert the fault.

The working tree is never modified: each mutant gets a copy in a temporary folder, and a pytest plugin ensures that the
tests there import that copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests/traps", "tests/tools")
COPIED = ("actors", "kernels", "web", "src", "tests", "pyproject.toml", "constraints.txt", "CHANGELOG.md")
NUM_WORKERS = 2
TEST_TIMEOUT_S = 20
RUN_TIMEOUT_S = 120
"""Of one file of tests; all of them without a fault have as many times more as there are files, up to ten."""
PASSED, FAILED = 0, 1
"""pytest's exit codes; all others mean that it could not run the tests."""

GUARD = '''
"""Ensures that the tests import this copy, and that failures occur in a test's body."""
import sys
from pathlib import Path

COPY = Path(__file__).resolve().parent
failures = []


def pytest_runtest_logreport(report):
    if report.failed:
        failures.append(report.when)


def pytest_sessionfinish(session):
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "quipu"]
    files = [Path(module.__file__ or next(iter(module.__path__))).resolve() for module in modules]
    if not files or not all(file.is_relative_to(COPY) for file in files):
        session.exitstatus = 70
    elif failures and "call" not in failures:
        session.exitstatus = 71
'''
TROUBLE = {70: "the tests did not import the copy", 71: "no test failed in its own body, only around it"}


@attrs.frozen
class Verdict:
    slug: str
    caught: bool
    seconds: float
    words: str
    """pytest's summary, or why there is none."""

    @property
    def line(self) -> str:
        return f"{'caught' if self.caught else 'NOT CAUGHT':10} {self.seconds:5.1f} s  {self.slug:28} {self.words}"


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quipu-mutant-") as folder:
        copy = Path(folder).resolve()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                # symlinks are kept: src/quipu points to the code of this copy
                shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / name)
        (copy / "mutant_guard.py").write_text(GUARD)
        yield copy


def find_traps() -> dict[str, str]:
    """Return the tests that have a mutant, by slug."""
    files = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/test_*.py")]
    return {path.stem.removeprefix("test_"): str(path.relative_to(ROOT)) for path in files}


def find_patches() -> set[str]:
    """Return the slugs of the patches, but for those of the simulation (`tests/simulation/mutants.py`)."""
    return {path.stem for path in ROOT.glob("tests/mutants/*.patch") if not path.stem.startswith("sim_")}


def run_timeout_s(files: list[str]) -> float:
    return RUN_TIMEOUT_S * min(len(files), 10)


def run_traps(copy: Path, files: list[str]) -> tuple[int, str]:
    """Run test files in a copy; return pytest's exit code and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutant_guard", f"--timeout={TEST_TIMEOUT_S}"]
    command += ["--tb=line", "--show-capture=no", *files]
    # without the C module: the faults are planted in Python code
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "QUIPU_COMPILED": "0"}
    result = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=run_timeout_s(files),
        check=False,
    )
    return result.returncode, result.stdout.decode("utf-8", "replace")


def summary(output: str) -> str:
    """Return pytest's counts: `2 failed, 1 passed`."""
    counts = re.findall(r"^(?:\d+ \w+(?:, )?)+(?= in )", output, re.MULTILINE)
    return counts[-1] if counts else output.strip().rpartition("\n")[2]


def try_mutant(slug: str, file: str) -> Verdict:
    started = time.perf_counter()

    def verdict(caught: bool, words: str) -> Verdict:
        return Verdict(slug, caught, time.perf_counter() - started, words)

    with copy_of_repository() as copy:
        applied = subprocess.run(
            ["git", "apply", str(ROOT / f"tests/mutants/{slug}.patch")],
            cwd=copy,
            # git must not treat a temporary folder inside another repository as part of it
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        if applied.returncode != 0:
            return verdict(False, f"the patch does not apply: {' '.join(applied.stderr.split())}")
        try:
            code, output = run_traps(copy, [file])
        except subprocess.TimeoutExpired:
            return verdict(False, f"the tests took longer than {RUN_TIMEOUT_S} s")
    if code == FAILED:
        return verdict(True, summary(output))
    return verdict(False, TROUBLE.get(code, f"pytest ended with {code}: {summary(output)}"))


def try_unmutated(files: list[str]) -> str | None:
    """Run the traps without a fault; return the summary if they fail."""
    with copy_of_repository() as copy:
        try:
            code, output = run_traps(copy, files)
        except subprocess.TimeoutExpired:
            return f"they took longer than {run_timeout_s(files)} s"
    return None if code == PASSED else TROUBLE.get(code, output)


def main(arguments: list[str]) -> int:
    started = time.perf_counter()
    traps = find_traps()
    patches = find_patches()
    wanted = set(arguments) or traps.keys() | patches
    incomplete = sorted(wanted - (traps.keys() & patches))
    for slug in incomplete:
        print(f"{slug}: no {'patch' if slug in traps else 'trap'} of this name")
    slugs = sorted(wanted & traps.keys() & patches)
    files = [traps[slug] for slug in slugs]
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        unmutated = pool.submit(try_unmutated, files)
        verdicts = []
        for verdict in pool.map(try_mutant, slugs, files):
            verdicts.append(verdict)
            print(verdict.line, flush=True)
        complaint = unmutated.result()
    if complaint is not None:
        print(f"the traps fail without a planted fault:\n{complaint}")
    num_caught = sum(verdict.caught for verdict in verdicts)
    print(f"{num_caught} of {len(verdicts)} mutants caught in {time.perf_counter() - started:.0f} s")
    return 0 if not incomplete and complaint is None and num_caught == len(verdicts) > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
