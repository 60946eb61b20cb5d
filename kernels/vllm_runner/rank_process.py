"""The process of a rank that follows rank 0: its worker, its part of the blocks, and the passes that it is told of.

`python -P -m quipu.kernels.vllm_runner.rank_process PARENT PASSES MOVES LAST_WORDS`, started by `followers.py` with the
descriptors of two connections and of memory for its last words.

What must always hold: this process ends with the one that started it, however that ends and whatever this one is doing;
it draws nothing, and goes on with what rank 0 has drawn; an error in a pass ends it, and with it the engine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from typing import NoReturn

from ..step_errors import is_out_of_memory

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> NoReturn:
    """Follow rank 0 until it ends."""
    parent, passes, moves, last_words = map(int, argv)
    bind_to(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in (passes, moves, last_words):
        os.set_inheritable(descriptor, False)
    # rank 0 shows the same, in the log's form
    warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())
    code = 0
    try:
        _follow(Connection(passes), Connection(moves))
    except EOFError:
        pass  # rank 0 is gone
    except BaseException as error:
        os.pwrite(last_words, f"{type(error).__name__}: {error}".encode(), 0)
        code = os.EX_TEMPFAIL if isinstance(error, Exception) and is_out_of_memory(error) else 1
    os._exit(code)  # libraries leave threads that may be waiting


def bind_to(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def _follow(passes: Connection, moves: Connection) -> None:
    place, config = passes.recv()
    from .vllm_settings import settle_environment

    settle_environment()
    from .following_rank import FollowingRank

    rank = FollowingRank(config, place, passes)
    rank.load()
    threading.Thread(target=rank.move_blocks, args=(moves,), name="moves", daemon=True).start()
    rank.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
