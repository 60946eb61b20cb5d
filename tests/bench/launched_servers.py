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
COMMANDS = ([str(Path(sys.executable).with_name("quipu"))], [sys.executable, "-m", "quipu.web.cli.cli"])
"""What benchmarks start servers with."""


def popen(command: Sequence[Any], **options: Any) -> subprocess.Popen[bytes] | Launched:
    """Start a command like `subprocess.Popen`."""
    arguments = _arguments_of(command)
    return subprocess.Popen(command, **options) if arguments is None else _launch(arguments, **options)


def run(command: Sequence[Any], *, check: bool, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command like `subprocess.run`."""
    arguments = _arguments_of(command)
    if arguments is None:
        return subprocess.run(command, check=check, **options)
    code = _launch(arguments, **options).wait()
    assert code == 0 or not check, (command, code)
    return subprocess.CompletedProcess(command, code)


def _arguments_of(command: Sequence[Any]) -> Sequence[str] | None:
    """Return the arguments of `quipu`, if that is what a command starts."""
    for words in COMMANDS:
        if list(command[: len(words)]) == words:
            return command[len(words) :]
    return None


def _launch(arguments: Sequence[str], **options: Any) -> Launched:
    folder, stdout = options.pop("cwd", Path()), options.pop("stdout", None)
    has_one_output = options.pop("stderr", None) == subprocess.STDOUT
    own_session = options.pop("start_new_session", False)
    assert options.keys() <= {"env"}, options
    with Path(os.devnull).open("wb") as nowhere, mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
        output = nowhere.fileno() if stdout in (None, subprocess.DEVNULL) else stdout.fileno()
        errors = output if has_one_output else sys.__stderr__.fileno()
        return launch(arguments, folder, output, errors, own_session=own_session)


def launch_servers_of(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Have these modules start `quipu` with the launcher."""
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": popen, "run": run})
    for module in modules:
        monkeypatch.setattr(f"{module}.subprocess", replaced)
