"""Runs shell blocks of the documents with bash, which finds only programs that the test answers for.

Each program in a block's PATH is the same small script: it sends its arguments and its input over a Unix socket, and
prints what comes back. So loops, functions, pipes, variables and redirections are bash's own, and a program that the
test does not know is "command not found".
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

PATIENCE_S = 60.0
REAL = ("cat", "chmod", "cp", "grep", "mkdir")
"""Programs that are run as they are."""
_STAND_IN = """\
#!{python} -SEs
import json, os, socket, sys
text = "" if os.path.basename(sys.argv[0]) == "curl" else sys.stdin.read()
with socket.socket(socket.AF_UNIX) as channel:
    channel.connect({address!r})
    argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    own = {{name: value for name, value in os.environ.items() if name.startswith("QUIPU_")}}
    call = {{"argv": argv, "cwd": os.getcwd(), "stdin": text, "environment": own}}
    channel.sendall(json.dumps(call).encode())
    channel.shutdown(socket.SHUT_WR)
    answer = json.loads(b"".join(iter(lambda: channel.recv(65536), b"")))
sys.stdout.write(answer["stdout"])
sys.stderr.write(answer["stderr"])
sys.exit(answer["code"])
"""


@attrs.frozen
class Call:
    """What a block runs: a program with its arguments, and what it reads."""

    argv: list[str]
    cwd: Path
    stdin: str = ""
    environment: dict[str, str] = attrs.field(factory=dict)
    """The variables of quipu that it has."""


@attrs.frozen
class Done:
    """What the program printed, and its exit code."""

    stdout: str = ""
    stderr: str = ""
    code: int = 0


@attrs.define(eq=False)
class Shell:
    """A folder with the programs, and the socket at which they are answered."""

    folder: Path
    programs: Iterable[str]
    _listener: socket.socket = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        address = self.folder / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._listener.settimeout(0.02)
        script = self.folder / "stand-in"
        script.write_text(_STAND_IN.format(python=sys.executable, address=str(address)))
        script.chmod(0o700)
        (self.folder / "bin").mkdir()
        for name in self.programs:
            (self.folder / "bin" / name).symlink_to(script)
        for name in REAL:
            (self.folder / "bin" / name).symlink_to(shutil.which(name) or name)

    def close(self) -> None:
        self._listener.close()

    def run(self, text: str, cwd: Path, answer: Callable[[Call], Done]) -> Done:
        """Run a block in a folder, and return what it prints. It ends at the first command that fails."""
        environment = {
            "PATH": str(self.folder / "bin"),
            "HOME": str(cwd),
            "LC_ALL": "C.UTF-8",
            "KEY": "none",
            "ADMIN_KEY": "none",
        }
        # files, since nobody reads a pipe while programs are answered
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            command = ["/bin/bash", "-euo", "pipefail", "-c", text]
            streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
            with subprocess.Popen(command, cwd=cwd, env=environment, **streams) as bash:
                try:
                    self._answer_while(bash, answer)
                finally:
                    bash.kill()
            out, err = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in (stdout, stderr))
            return Done(out, err, bash.returncode)

    def _answer_while(self, bash: subprocess.Popen[str], answer: Callable[[Call], Done]) -> None:
        while bash.poll() is None:
            try:
                channel, _ = self._listener.accept()
            except TimeoutError:
                continue
            with channel:
                channel.settimeout(PATIENCE_S)
                call = json.loads(_received(channel))
                done = answer(Call(call["argv"], Path(call["cwd"]), call["stdin"], call["environment"]))
                channel.sendall(json.dumps(attrs.asdict(done)).encode())


def _received(channel: socket.socket) -> bytes:
    return b"".join(iter(lambda: channel.recv(65536), b""))
