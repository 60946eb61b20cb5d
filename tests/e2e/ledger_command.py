"""`quipu ledger` for tests, run in the test's own process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import attrs
import pytest

from quipu.web.cli.cli import main


@attrs.frozen
class CommandResult:
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def ledger(folder: Path, *arguments: str, **environment: str) -> CommandResult:
    """Run `quipu ledger ARGUMENTS` on a server's folder, in this process: starting a process takes a second."""
    where = ["--data-dir", str(folder / "data")]
    out, err = io.BytesIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.TextIOWrapper(out, write_through=True)) as stdout,
        redirect_stderr(err),
    ):
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            code = main(["ledger", arguments[0], *where, *arguments[1:]])
        except SystemExit as end:  # from argparse
            code = int(end.code or 0)
        stdout.detach()
    return CommandResult(code, out.getvalue().decode(), err.getvalue())
