"""The control flow of `make gpu ARGS="--only vllm"`: what it says and returns when parts fail, hang, or cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.gpu import vllm_on_gpu
from tests.gpu.vllm_on_gpu import NOT_INSTALLED, Part, main, parts, run


def python(name: str, code: str, limit_s: float = 60) -> Part:
    return Part(name, ["-c", code], limit_s)


def test_results_of_parts() -> None:
    """The last line is what a part has found: parsed if it is JSON; a part that fails has none."""
    assert run(python("says", "print(1); print('12 passed')"))["found"] == "12 passed"
    assert run(python("tells", "print('noise'); import json; print(json.dumps({'same': [3]}))"))["found"] == {
        "same": [3]
    }
    failed = run(python("fails", "import sys; print('x'); sys.exit(4)"))
    assert not failed["ok"] and failed["why"] == "exit code 4" and "found" not in failed


def test_part_that_hangs_is_ended_with_its_children() -> None:
    """What a part has started, servers for one, does not outlive it."""
    child = "import signal; print('up', flush=True); signal.pause()"
    parent = (
        "import signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    # the part's output ends only once the child, which has it open too, has ended
    row = run(python("hangs", parent, limit_s=3))
    assert not row["ok"] and row["why"] == "took more than 3 s" and row["seconds"] < 30


@pytest.mark.parametrize(("last", "code"), [("print('ok')", 0), ("raise SystemExit(1)", 1)])
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str, code: int) -> None:
    """All parts run, whatever becomes of the first; the report has a row for each, and the exit code is theirs."""
    chosen = [python("first", last), python("second", "print('3 passed')")]
    with (
        mock.patch.object(vllm_on_gpu, "check_installed", return_value="0.32.0"),
        mock.patch.object(vllm_on_gpu, "parts", return_value=chosen),
    ):
        assert main(tmp_path / "report", rehearsal=True) == code
    report = json.loads((tmp_path / "report").read_text())
    assert [(row["name"], row["ok"]) for row in report["vllm"]] == [("first", code == 0), ("second", True)]
    assert report["machine"]["vllm"] == "0.32.0" and "name second" in capsys.readouterr().out


@pytest.mark.parametrize("why", ["which is not installed", "and vllm 0.33.1 is installed"])
def test_no_supported_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str], why: str) -> None:
    """One line, an exit code of its own, and no report."""
    with mock.patch.object(vllm_on_gpu, "check_installed", side_effect=ValueError(f"vLLM 0.32 is needed, {why}")):
        assert main(tmp_path / "report", rehearsal=False) == NOT_INSTALLED
    assert capsys.readouterr().out == f"vLLM 0.32 is needed, {why}\n" and not (tmp_path / "report").exists()


def test_missing_packages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What the tests there need is asked for before anything runs."""
    with (
        mock.patch.object(vllm_on_gpu, "check_installed", return_value="0.32.0"),
        mock.patch.object(vllm_on_gpu, "_NEEDED", ("pytest", "not_a_package")),
    ):
        assert main(tmp_path / "report", rehearsal=False) == NOT_INSTALLED
    assert capsys.readouterr().out == "not installed: not_a_package (`make gpu-wheels` collects them)\n"


def test_parts_exist() -> None:
    """Modules and tests that are named are there, and each part has a limit."""
    for part in [*parts(rehearsal=False), *parts(rehearsal=True)]:
        assert part.limit_s > 0
        named = [argument for argument in part.arguments if argument.endswith(".py")]
        assert all(Path(path).is_file() for path in named)
        if part.arguments[1].startswith("bench."):
            flags = [argument for argument in part.arguments[2:] if argument.startswith("--")]
            usage = subprocess.run([sys.executable, "-m", part.arguments[1], "--help"], capture_output=True, text=True)
            assert all(flag in usage.stdout for flag in flags)
