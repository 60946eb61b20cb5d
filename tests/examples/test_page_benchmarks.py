"""Every benchmark of the documents is run as it stands there, with `--quick` after its flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.page_benchmarks import NOT_RUN, benchmarks, parts_of
from tests.examples.page_blocks import ROOT
from tests.examples.page_parsing import spelled_out


@pytest.mark.parametrize(
    ("synopsis", "lines"),
    [
        ("python -m a T --b c|d [--e 1] [--f FILE]  # g", ["python -m a T --b c --e 1", "python -m a T --b d --e 1"]),
        ("python -m a --capacity BLOCKS|inf [FLAGS OF b]", ["python -m a --capacity inf"]),
        ("python -m a --format ...", ["python -m a"]),
    ],
)
def test_synopses_are_spelled_out(synopsis: str, lines: list[str]) -> None:
    """Each choice is made once, and what may be left out is there if it has a value."""
    assert list(spelled_out(synopsis)) == lines


def test_exceptions_are_on_a_page() -> None:
    """What is not run is on a page, and has a reason."""
    assert NOT_RUN.keys() <= set(benchmarks()) and all(NOT_RUN.values())


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in benchmarks() if line not in NOT_RUN])
def test_benchmark_runs(line: str, tmp_path: Path) -> None:
    """A benchmark prints something and exits with 0, with less to do than the page says."""
    (tmp_path / "docs/graphs").mkdir(parents=True)
    variables, words = parts_of(line)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", *words, "--quick"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
