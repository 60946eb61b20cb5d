"""The first lines of the engine process: bind it to its parent, then load the engine and run it.

`python -P -m quipu.actors.processes.engine_process FD INCARNATION CONFIG`, see `engine.main`. Started by
`process_host.py`. Loading (torch, the weights) takes from seconds to minutes, so the engine is imported only once a
thread watches the socket.

What must always hold: this process ends within a second of its parent, also of a killed one, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time

from .child import end_with_parent

ENGINE = "quipu.actors.engine"
ORDERLY_END_S = 0.75
"""How long the engine may take to end by itself (flush its logs, close its sockets) once its parent has gone."""


def bind_to_parent(descriptor: int) -> None:
    """End this process when the other end of its socket closes, if it has not ended by itself by then."""
    os.set_inheritable(descriptor, False)
    threading.Thread(target=end_with_parent, args=(descriptor, _end_late), name="parent", daemon=True).start()


def _end_late(code: int) -> None:
    time.sleep(ORDERLY_END_S)
    os._exit(code)


def main(argv: list[str]) -> None:
    """Run the engine; does not return."""
    bind_to_parent(int(argv[0]))
    code = importlib.import_module(ENGINE).main(argv)
    with contextlib.suppress(OSError):  # nobody reads them any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # a pass may be running in its thread; nobody waits for it any more


if __name__ == "__main__":
    main(sys.argv[1:])
