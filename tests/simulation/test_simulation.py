"""Seeds of the simulation: nothing is wrong, and the same seed does the same everywhere."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import attrs
import pytest

from quipu.actors.request_desk.open_requests import OpenRequest
from tests.simulation import __main__ as command_line
from tests.simulation.outcome import run_seed
from tests.simulation.plan import Plan, draw_plan
from tests.simulation.shrinking import replay_command, shrink
from tests.simulation.virtual_time import check_trio

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(500)
"""They take a minute on two cores; `make soak` runs more."""
SAME_EVERYWHERE = range(20)


def test_trio_is_as_expected() -> None:
    """The private parts of trio that a simulation replaces are there; otherwise no run could be repeated."""
    check_trio()


@pytest.mark.parametrize("first", SEEDS[::20])
def test_nothing_is_wrong(first: int) -> None:
    """With whatever a seed draws, the oracle finds nothing wrong with answers, books, waiting and what remains."""
    wrong = {seed: found for seed in range(first, first + 20) if (found := run_seed(seed).violations)}
    assert not wrong, "see python -m tests.simulation --seed " + " or ".join(map(str, wrong))


def test_oracle_shares_no_code_with_the_server() -> None:
    """What judges, and what computes right answers, imports nothing of the server."""
    folder = Path(__file__).parent
    named = [folder / f"{name}.py" for name in ("oracle", "evidence", "seen", "passes", "fake_grammars")]
    for judge in (*folder.glob("judged_*.py"), *folder.glob("expected*.py"), *named):
        for node in ast.walk(ast.parse(judge.read_text("utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name and name.startswith("quipu") for name in names), judge.name


def test_same_trace_in_another_process() -> None:
    """A seed's messages and times are the same in another process, with another hash seed."""
    command = [
        sys.executable,
        "-m",
        "tests.simulation",
        "--seeds",
        f"0:{len(SAME_EVERYWHERE)}",
        "--json",
        "--jobs",
        "1",
    ]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert found[:-1] == [run_seed(seed).shown() for seed in SAME_EVERYWHERE], run.stderr


def test_replay_command_of_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """With a fault in the server, a seed fails, and the command that is printed fails for the same reason."""
    seed = SAME_EVERYWHERE[-1]
    with mock.patch.object(OpenRequest, "expire", lambda opened, after_s: None):  # deadlines are ignored
        assert _run("--seed", str(seed)) == 1
        printed = capsys.readouterr()
        assert "WRONG deadlines_hold" in printed.out
        command = shlex.split(printed.err.partition("replay: ")[2])
        assert command[:3] == ["python", "-m", "tests.simulation"]
        assert "--arrivals" in command and command[-2:] == ["--faults", "none"]
        assert _run(*command[3:], "--no-shrink") == 1
        assert "WRONG deadlines_hold" in capsys.readouterr().out
    assert _run(*command[3:]) == 0


def _run(*arguments: str) -> int:
    with mock.patch.object(sys, "argv", ["tests.simulation", *arguments]):
        return command_line.main()


def test_shrunk_to_what_matters() -> None:
    """A failing plan keeps the arrivals and faults without which it does not fail, and its command names them."""
    plan = next(plan for seed in range(100) if len((plan := draw_plan(seed)).faults) > 2 and len(plan.arrivals) > 8)

    def fails(smaller: Plan) -> bool:
        return {2, 7} <= {a.number for a in smaller.arrivals} and 1 in {f.number for f in smaller.faults}

    smallest = shrink(plan, fails)
    assert replay_command(smallest) == f"python -m tests.simulation --seed {plan.seed} --arrivals 2,7 --faults 1"
    assert attrs.evolve(plan).only([2, 7], [1]) == smallest
