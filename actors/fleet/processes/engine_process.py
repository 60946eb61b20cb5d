"""Entry point of the engine process: bind it to its parent, then load the engine and run it.

`python -P -m quipu.actors.fleet.processes.engine_process LIFELINE ...`, see `engine_server.main`. Started by
`process_host.py`. Loading (torch, the weights) takes from seconds to minutes, so the engine is imported only once a
thread watches the lifeline, a pipe whose other end only the parent has: it closes when the parent ends, or wants the
engine to. After a lost connection the engine may get a new one.

What must always hold: this process ends within a second after its parent, even if the parent is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from .child import LOADING_ERRORS, end_with_parent, is_shortage

ENGINE = "quipu.actors.engine.engine_server"
OOM_SCORE, MAX_OOM_SCORE = 500, 1000
"""How much likelier than its parent this process is killed when memory runs out, in the kernel's units."""
ORDERLY_END_S = 0.75
"""How long the engine may take to shut down (flush logs, close sockets) once its parent is gone."""


def bind_to_parent(lifeline: int) -> None:
    """End this process soon after the other end of its lifeline closes, unless it ends by itself first."""
    os.set_inheritable(lifeline, False)
    threading.Thread(target=end_with_parent, args=(lifeline, _end_late), name="parent", daemon=True).start()


def pin(config_json: str) -> None:
    """Keep this process, and the threads that torch will start, to the CPUs of its configuration that still exist."""
    cpus = json.loads(config_json).get("cpus")
    if cpus is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def be_killed_first() -> None:
    """Have the kernel choose this process and not its parent, which keeps the books, if memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        score.write_text(str(min(MAX_OOM_SCORE, int(score.read_text()) + OOM_SCORE)))


def _end_late(code: int) -> None:
    time.sleep(ORDERLY_END_S)
    os._exit(code)


def main(argv: list[str]) -> None:
    """Run the engine; does not return."""
    pin(argv[-1])  # first: threads inherit it
    bind_to_parent(int(argv[0]))
    be_killed_first()
    try:
        engine = importlib.import_module(ENGINE)
    except LOADING_ERRORS as error:
        if not is_shortage(error):
            raise
        os._exit(os.EX_TEMPFAIL)
    code = engine.main(argv)
    with contextlib.suppress(OSError):  # nothing reads them any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # a pass may still be running in its thread


if __name__ == "__main__":
    main(sys.argv[1:])
