"""Has benchmarks start `quipu` with `tests/e2e/launcher.py`, which saves seconds of processor time for each server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.e2e.launcher import Launched, launch

ENVIRONMENT = dict(os.environ)
"""As it is when tests are collected: benchmarks set variables that are read when torch is loaded."""
COMMANDS = {
    (str(Path(sys.executable).with_name("quipu")),): "",
    (sys.executable, "-m", "quipu.web.cli.cli"): "",
    (sys.executable, "-m", "bench.accounting_null"): "bench.accounting_null",
    (sys.executable, "-m", "bench.timed_server"): "bench.timed_server",
}
"""What benchmarks start servers with, and the module that it runs; empty: the installed command's."""


def popen(command: Sequence[Any], **options: Any) -> subprocess.Popen[bytes] | Launched:
    """Start a command like `subprocess.Popen`."""
    known = _known(command)
    return subprocess.Popen(command, **options) if known is None else _launch(*known, **options)


def run(command: Sequence[Any], *, check: bool, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command like `subprocess.run`."""
    known = _known(command)
    if known is None:
        return subprocess.run(command, check=check, **options)
    code = _launch(*known, **options).wait()
    assert code == 0 or not check, (command, code)
    return subprocess.CompletedProcess(command, code)


def _known(command: Sequence[Any]) -> tuple[str, Sequence[str]] | None:
    """Return the module and the arguments of a command, if it is one of `COMMANDS`."""
    for words, module in COMMANDS.items():
        if tuple(command[: len(words)]) == words:
            return module, command[len(words) :]
    return None


def _launch(module: str, arguments: Sequence[str], **options: Any) -> Launched:
    folder, stdout = options.pop("cwd", Path()), options.pop("stdout", None)
    has_one_output = options.pop("stderr", None) == subprocess.STDOUT
    own_session = options.pop("start_new_session", False)
    added = {name: value for name, value in options.pop("env", {}).items() if os.environ.get(name) != value}
    assert not options, options
    with Path(os.devnull).open("wb") as nowhere, mock.patch.dict(os.environ, ENVIRONMENT | added, clear=True):
        output = nowhere.fileno() if stdout in (None, subprocess.DEVNULL) else stdout.fileno()
        errors = output if has_one_output else sys.__stderr__.fileno()
        return launch(arguments, folder, output, errors, own_session=own_session, module=module)


def launch_servers_of(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Have these modules start `quipu` with the launcher."""
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": popen, "run": run})
    for module in modules:
        monkeypatch.setattr(f"{module}.subprocess", replaced)
