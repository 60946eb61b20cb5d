"""`make gpu ARGS="--only vllm"`: what only a GPU can show of `--executor vllm`, with the vLLM that is installed there.

Each part is a process of its own with a time limit, because vLLM keeps the device and its threads until its process
ends: the text of a small random model against transformers, the tests of a backend, and the bench beside `vllm serve`.
If one fails, the others run. This process does not start CUDA.

What must always hold: without a supported vLLM nothing is run, one line says so, and the exit code is `NOT_INSTALLED`;
a part that did not end well is never a success.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from quipu.kernels.vllm_runner.vllm_settings import check_installed

NOT_INSTALLED = 3
_SHOWN = 2000
"""Characters of a failed part's output that are shown."""
_NEEDED = ("pytest", "pytest_timeout", "pytest_trio", "xdist", "hypothesis")
_TESTS = ("tests/vllm_runner/test_vllm_backend.py", "tests/vllm_runner/test_v2_ahead.py")


@attrs.frozen
class Part:
    """One process."""

    name: str
    arguments: Sequence[str]
    """For this interpreter."""
    limit_s: float


def parts(*, rehearsal: bool) -> list[Part]:
    """Return what is run. A rehearsal is short, and runs on the CPU."""
    bench = ["-m", "bench.vllm_runner", "--json", "--python", sys.executable]
    parity = Part("parity", ["-m", "tests.gpu.vllm_parity"], 600)
    if rehearsal:
        tests = ["-m", "pytest", "-q", _TESTS[0], "-k", "warm"]
        return [parity, Part("tests", tests, 600), Part("bench, tiny model", [*bench, "--quick"], 900)]
    return [
        parity,
        Part("tests", ["-m", "pytest", "-q", *_TESTS], 1200),
        Part("bench, tiny model", [*bench, "--gpu", "--quick"], 900),
        Part("bench, 0.6B shape", [*bench, "--gpu", "--rounds", "1"], 2400),
    ]


def run_all(chosen: Sequence[Part]) -> list[dict[str, Any]]:
    """Run each part and return what it says: its last line, parsed if it is JSON."""
    rows = []
    for part in chosen:
        rows.append(run(part))
        print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def run(part: Part) -> dict[str, Any]:
    """Run one part; one that takes too long is ended, with the servers that it has started."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=part.limit_s)
        why = None if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        why = f"took more than {part.limit_s:g} s"
    row = {"name": part.name, "ok": why is None, "seconds": round(time.monotonic() - started, 1)}
    if why is not None:
        print(f"{part.name}: {why}\n{output[-_SHOWN:]}\n{errors[-_SHOWN:]}", file=sys.stderr)
        return {**row, "why": why}
    return {**row, "found": _last(output)}


def _last(output: str) -> Any:
    line = (output.strip().splitlines() or [""])[-1]
    try:
        return json.loads(line)
    except ValueError:
        return line


def main(report_to: Path, *, rehearsal: bool) -> int:
    """Run all parts and write their rows as JSON. Return the exit code."""
    try:
        version = check_installed()
    except ValueError as error:
        print(error)
        return NOT_INSTALLED
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)} (`make gpu-wheels` collects them)")
        return NOT_INSTALLED
    print(f"vllm {version}")
    rows = run_all(parts(rehearsal=rehearsal))
    report_to.write_text(json.dumps({"machine": {"vllm": version, "rehearsal": rehearsal}, "vllm": rows}, indent=1))
    return 0 if all(row["ok"] for row in rows) else 1
