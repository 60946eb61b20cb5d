"""Drive clients from npm against `quipu serve demo`: a tool is called, carried out, and its result used in an answer.

`make agents` installs the clients and runs this. Each session (`sessions.py`) checks what its client did; here every
request has to be answered, and what the server streamed has to have the shapes of `goldens/`. `--write` replaces these,
and the recorded requests.
`--only NAME` runs one session, and `--times N` each of them N times.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.agents.cleaning import cleaned
from tests.agents.recorder import Recorder, recording
from tests.agents.sessions import COMMAND_LINES, SESSIONS, Place, Session, SessionFailed, scripted_flags
from tests.agents.shapes import stream_shape
from tests.e2e.servers import Server, serving

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens"
REQUESTS = HERE / "requests"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("--clients", type=Path, default=Path(".agents"), help="where npm has installed the clients")
    parser.add_argument("--only", choices=SESSIONS, metavar="NAME", help="run one session: " + ", ".join(SESSIONS))
    parser.add_argument("--times", type=int, default=1, help="(default: 1)")
    parser.add_argument("--write", action="store_true", help="replace the goldens and the recorded requests")
    arguments = parser.parse_args()
    clients = arguments.clients.resolve()
    for script in [*HERE.glob("*.mjs"), HERE / "tool.json"]:
        shutil.copy(script, clients)
    num_failed = 0
    with tempfile.TemporaryDirectory() as kept, serving(Path(kept) / "server", "demo") as server:
        for name in [arguments.only] if arguments.only else SESSIONS:
            for _ in range(arguments.times):
                started = time.monotonic()
                try:
                    told = run_session(name, server, clients, write=arguments.write)
                except SessionFailed as error:
                    num_failed += 1
                    told = f"FAILED: {error}"
                written = "scripted" if SESSIONS[name].call else "the model's own"
                print(f"{name:22} {written:16} {time.monotonic() - started:5.1f} s  {told}", flush=True)
        server.wait_at_rest()
    return 1 if num_failed else 0


def run_session(name: str, server: Server, clients: Path, *, write: bool) -> str:
    """Run a session with the demo model's server or one of its own; return what to say about it."""
    session = SESSIONS[name]
    with ExitStack() as stack:
        kept = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = kept / "work"
        folder.mkdir()
        if session.call is not None:
            server = stack.enter_context(serving(kept / "server", *scripted_flags(session.call(folder), kept)))
        num_logged = len(server.events("request.done"))
        with recording(server.url) as recorder:
            session.drive(Place(recorder.url, clients, folder))
        check_answered(session, recorder, server.events("request.done")[num_logged:])
        compare(name, recorder, write=write)
    return f"{len(recorder.streams)} streams"


def check_answered(session: Session, recorder: Recorder, logged: list[dict[str, Any]]) -> None:
    """Check that no request failed, except for those that must be refused and Claude Code's HEAD of `/`."""
    failed = [line for line in logged if line["outcome"] != "finished"]
    if [line.get("error_param") for line in failed] != list(session.refusals):
        raise SessionFailed(f"requests that did not finish: {failed}")
    refused = [one for one in recorder.exchanges if one.status >= 400 and one.method != "HEAD"]
    if len(refused) != len(failed):
        raise SessionFailed("; ".join(f"{one.endpoint} {one.status} {one.answer.decode()}" for one in refused))


def compare(name: str, recorder: Recorder, *, write: bool) -> None:
    """Compare the shape of each stream of a session with its golden, or replace it and the session's requests."""
    shapes: list[Any] = [{one.endpoint: stream_shape(one.answer.decode())} for one in recorder.streams]
    golden = GOLDENS / f"{name}.json"
    if write:
        if name in COMMAND_LINES:
            recorded = [{one.endpoint: cleaned(one.request)} for one in recorder.streams]
            (REQUESTS / golden.name).write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
        golden.write_text(json.dumps(shapes, indent=1) + "\n")
    elif shapes != json.loads(golden.read_text()):
        raise SessionFailed(f"the streams are not those of {golden.name}; --write and `git diff` show what changed")


if __name__ == "__main__":
    sys.exit(main())
