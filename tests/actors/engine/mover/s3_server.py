"""A real S3 server for tests: nanio, a package for tests that checks signatures, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from tests.processes import eventually, free_ports

ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTEST", "not-a-secret-because-it-is-here"
BUCKET = "kv-blocks"


@attrs.define(eq=False)
class S3Server:
    """A server that can be killed and started again at the same address, with the same objects."""

    folder: Path
    port: int
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        keys = {"NANIO_ACCESS_KEY": ACCESS_KEY, "NANIO_SECRET_KEY": SECRET_KEY}
        command = [sys.executable, "-m", "nanio", "serve", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--data-dir", str(self.folder), "--no-access-log", "--log-level", "error"]
        (self.folder / BUCKET).mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(command, env={**os.environ, **keys})
        eventually(self._answers, "the S3 server answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).close()
        except urllib.error.HTTPError as error:  # it has answered that the signature is missing
            error.close()
            return True
        except OSError:
            return False
        return True


@contextmanager
def running_s3(folder: Path) -> Iterator[S3Server]:
    server = S3Server(folder, free_ports(1)[0])
    server.start()
    try:
        yield server
    finally:
        server.kill()


def use_endpoint(patch: pytest.MonkeyPatch, port: int) -> None:
    """Set the environment as an operator would, for a server on loopback."""
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        patch.delenv(name)
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    patch.setenv("AWS_REGION", "us-east-1")
