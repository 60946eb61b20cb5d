"""A program `quipu` for shell scripts of the documents, which costs next to nothing to start.

It is a small script that hands its arguments, folder, environment and streams to the test over a Unix socket, passes
SIGTERM on, and ends with the code of the command. Servers are forked by the launcher (`launcher.py`), other commands
run in the test's own process, one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from quipu.web.cli.cli import main
from tests.e2e.launcher import launch

_PROGRAM = """\
#!{python} -SEs
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
    channel.connect({address!r})
    call = {{"argv": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
    socket.send_fds(channel, [json.dumps(call).encode()], [1, 2])
    pid = int(channel.recv(16))
    if pid:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    code = int(channel.recv(16))
sys.exit(code)
"""
MAX_CALL_BYTES = 1 << 17


@contextlib.contextmanager
def quipu_for_scripts(folder: Path) -> Iterator[str]:
    """Provide a PATH with the program, and with `python3`. Servers that it has started are killed at the end."""
    address = folder / "socket"
    folder.mkdir()
    program = folder / "quipu"
    program.write_text(_PROGRAM.format(python=sys.executable, address=str(address)))
    program.chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        answering = _Answering(listener)
        threading.Thread(target=answering.run, daemon=True).start()
        try:
            yield os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for pid in list(answering.servers):
                os.kill(pid, signal.SIGKILL)


@attrs.define(eq=False)
class _Answering:
    listener: socket.socket
    servers: set[int] = attrs.field(factory=set)
    one_at_a_time: Any = attrs.field(factory=threading.Lock)

    def run(self) -> None:
        while True:
            try:
                channel, _ = self.listener.accept()
            except OSError:  # it has been shut down
                return
            threading.Thread(target=self._answer, args=(channel,), daemon=True).start()

    def _answer(self, channel: socket.socket) -> None:
        with channel:
            data, streams, _, _ = socket.recv_fds(channel, MAX_CALL_BYTES, 2)
            call = json.loads(data)
            with contextlib.ExitStack() as stack:
                for stream in streams:
                    stack.callback(os.close, stream)
                if call["argv"][:1] == ["serve"]:
                    code = self._serve(call, streams, channel)
                else:
                    channel.send(b"0")
                    with self.one_at_a_time:
                        code = _run(call["argv"], Path(call["folder"]), call["environment"], streams)
            channel.send(str(code).encode())

    def _serve(self, call: Mapping[str, Any], streams: list[int], channel: socket.socket) -> int:
        process = launch(call["argv"], Path(call["folder"]), *streams, environment=call["environment"])
        self.servers.add(process.pid)
        channel.send(str(process.pid).encode())
        code = process.wait()
        self.servers.discard(process.pid)
        return code


def _run(argv: list[str], folder: Path, environment: Mapping[str, str], streams: list[int]) -> int:
    """Run a command in this process, as if it were one of its own."""
    with (
        open(streams[0], "w", closefd=False) as out,
        open(streams[1], "w", closefd=False) as err,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            return main(argv)
        except SystemExit as left:  # from argparse
            return int(left.code or 0)
