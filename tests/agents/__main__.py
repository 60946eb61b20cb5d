"""Drive clients from npm against `quipu serve demo`: a tool is called, carried out, and its result used in an answer.

`make agents` installs the clients and runs this. What the server streamed to each client is compared with
`goldens/`, which `--write` replaces.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.agents.recorder import Exchange, Recorder, recording
from tests.agents.shapes import stream_shape
from tests.e2e.servers import Server, serving

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens"
SCRIPT_S = 120.0
MEANT_TO_BE_REFUSED = "thread_unsupported_request"
"""Anthropic's tool runner asks for a conversation that the server keeps, and sends whole ones after this error."""

Session = Callable[[Recorder, Path, Path], None]


class SessionFailed(Exception):
    """A client did not do what its session is for."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("--clients", type=Path, default=Path(".agents"), help="where npm has installed the clients")
    parser.add_argument("--write", action="store_true", help="replace the goldens")
    arguments = parser.parse_args()
    clients = arguments.clients.resolve()
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, clients)
    failed = 0
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "server", "demo") as server:
        for name, session in SESSIONS.items():
            started = time.monotonic()
            try:
                told = run_session(name, session, server, clients, write=arguments.write)
            except SessionFailed as error:
                failed += 1
                told = f"FAILED: {error}"
            print(f"{name:20} {time.monotonic() - started:5.1f} s  {told}", flush=True)
        server.wait_at_rest()
    return 1 if failed else 0


def run_session(name: str, session: Session, server: Server, clients: Path, *, write: bool) -> str:
    """Run a session and check what the server streamed in it; return what to say about it."""
    num_logged = len(server.events("request.done"))
    with recording(server.url) as recorder, tempfile.TemporaryDirectory() as folder:
        session(recorder, clients, Path(folder))
    refused = [exchange for exchange in recorder.exchanges if exchange.status >= 400 and not is_meant(exchange)]
    if refused:
        raise SessionFailed("; ".join(f"{one.endpoint} {one.status} {one.answer.decode()}" for one in refused))
    for line in server.events("request.done")[num_logged:]:
        if line["outcome"] != "finished" and line.get("error_param") != "thread":
            raise SessionFailed(f"a request did not finish: {line}")
    compare(name, recorder, write=write)
    return f"{len(recorder.streams)} streams as expected"


def is_meant(exchange: Exchange) -> bool:
    return exchange.status == 400 and MEANT_TO_BE_REFUSED in exchange.answer.decode()


def compare(name: str, recorder: Recorder, *, write: bool) -> None:
    """Compare the shape of each stream of a session with its golden, or replace the golden."""
    shapes: list[Any] = [{one.endpoint: stream_shape(one.answer.decode())} for one in recorder.streams]
    golden = GOLDENS / f"{name}.json"
    if write:
        GOLDENS.mkdir(exist_ok=True)
        golden.write_text(json.dumps(shapes, indent=1) + "\n")
    elif shapes != json.loads(golden.read_text()):
        raise SessionFailed(f"the streams are not those of {golden.name}; --write and `git diff` show what changed")


def script(name: str) -> Session:
    """Return a session that is a script of ours with an SDK."""

    def session(recorder: Recorder, clients: Path, folder: Path) -> None:
        run_client(["node", str(clients / f"{name}.mjs")], folder, {"QUIPU_URL": recorder.url})

    return session


def run_client(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a client with an empty home in `folder`; return its output."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=kept | {"HOME": str(folder)} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SessionFailed(f"not done after {SCRIPT_S:.0f} s: {error.stdout!r} {error.stderr!r}") from error
    if done.returncode:
        raise SessionFailed(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


SESSIONS: dict[str, Session] = {
    "openai-chat": script("chat"),
    "openai-responses": script("responses"),
    "anthropic-messages": script("messages"),
}

if __name__ == "__main__":
    sys.exit(main())
