"""`quipu serve` with its functions timed, in both processes.

    QUIPU_BENCH_SPANS=FOLDER python -m bench.timed_server FLAGS...

Used by `engine_overhead.py` and `request_budget.py` through `TimedServer`, which starts one with dummy weights in the
shape of Qwen3-0.6B and the tokenizer of 151,936 entries from `bench.peers`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from bench.http_load import free_port
from bench.spans import FOLDER, watch
from quipu.actors.detokenizer.actor import Detokenizer
from quipu.actors.fleet.processes.process_host import ProcessHost
from quipu.actors.tokenizer import actor as tokenizer
from quipu.actors.tokenizer.encoder import TextEncoder
from quipu.web.api import answer
from quipu.web.api.openai import routes
from quipu.web.cli import cli
from quipu.web.http.sse import Sink

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 300.0
MODEL = "model"


class TimedServer:
    """A timed server in a subprocess; leave the block before reading its spans."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "bench.timed_server", str(model), "--port", str(self.port)]
        command += ["--speculative", "off", *flags]  # random weights repeat themselves, which would be guessed
        command += ["--served-model-name", MODEL, "--log-level", "warning", "--data-dir", str(folder / "data")]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": paths}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment)

    def __enter__(self) -> TimedServer:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                    return self
            except OSError:
                time.sleep(0.1)
        self.__exit__()
        raise RuntimeError("the server did not start; see its output above")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    ProcessHost.MODULE = "bench.timed_engine"
    watch(answer, "parse_object", "parse")
    watch(routes, "_read", "parse")
    watch(TextEncoder, "encode_chat", "tokenise")
    watch(TextEncoder, "encode_text", "tokenise")
    watch(tokenizer, "chain_image_keys", "hash")
    watch(Detokenizer, "_decode_slice", "detokenise")
    watch(Sink, "push", "write")
    return cli.main(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
