"""`quipu top` as a process: on a terminal, which it restores, in a pipe, and with a server that goes."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable

import pytest

from tests.e2e.servers import QUIPU
from tests.e2e.terminals import CTRL_C, on_a_terminal
from tests.web.cli.bench.bench_server import serving
from tests.web.cli.top.scripted_server import Server


def in_a_shell(url: str) -> tuple[str, ...]:
    """Return a shell that says how the terminal is set before and after, and the exit code."""
    script = f"trap : INT; before=$(stty -g); {shlex.quote(str(QUIPU))} top {url} -n 0.1; code=$?; "
    return "sh", "-c", f'{script} [ "$before" = "$(stty -g)" ] && echo code $code restored'


@pytest.mark.parametrize(
    ("leave", "code"),
    [(lambda typist: typist.type("q"), 0), (lambda typist: typist.type(CTRL_C), 130)],
    ids=["q", "^C"],
)
def test_terminal(leave: Callable[..., None], code: int) -> None:
    """The screen shows the numbers, and what happens to the server; the terminal is restored."""
    server = Server()
    with serving(server.answer) as scripted, on_a_terminal(*in_a_shell(scripted.url)) as typist:
        typist.read_until("running 3")
        typist.read_until("75.0% (150 of 200)")
        server.is_gone = True
        typist.read_until("not reachable since")
        server.is_gone = False
        typist.read_until("now -")
        leave(typist)
        typist.read_until(f"code {code} restored")


def test_pipe() -> None:
    """The command ends quietly when whoever reads its lines has seen enough."""
    with serving(Server().answer) as scripted:
        script = f"{shlex.quote(str(QUIPU))} top {scripted.url} -n 0.1 | head -2"
        done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert all("  running 3  " in line and "\x1b" not in line for line in done.stdout.splitlines())
