"""What the checks of `python -m tests.deploy` share: programs, temporary folders, and how a check fails."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


class CannotRun(Exception):
    """A program or package that a check needs is not installed."""


class Failed(Exception):
    """A check found something wrong; the message says what."""


def program(name: str, package: str) -> str:
    """Return the path of a program, also of those that only root has in its path. Raises CannotRun."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        raise CannotRun(f"not run: there is no {name} (Debian: apt-get install {package})")
    return found


def run(
    *command: str, cwd: Path | None = None, stdin: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program to its end and return what it printed. Raises Failed."""
    done = subprocess.run(command, cwd=cwd, input=stdin, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise Failed(f"{Path(command[0]).name} exited with {done.returncode}: {(done.stdout + done.stderr).strip()}")
    return done.stdout


@contextmanager
def running(*command: str, log_path: Path, cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block is left; its output goes to a file, and into the reason if the block fails."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=cwd)
    try:
        yield process
    except Exception as error:
        said = log_path.read_text("utf-8", "replace")[-2000:].strip()
        raise Failed(f"{error}; {Path(command[0]).name} said: {said or 'nothing'}") from error
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
