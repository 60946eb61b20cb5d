"""Whether an engine could not be loaded because memory, threads or file descriptors are short.

Used by `engine_process.py` and `engine_server.py`. There may be enough later, so another start may succeed.
"""

from __future__ import annotations

import errno

NUMBERS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
TEXTS = (
    "failed to map segment from shared object",  # the dynamic linker, as ImportError
    "cannot allocate memory",
    "can't allocate memory",  # torch
    "can't start new thread",
)
LOADING_ERRORS = (ImportError, RuntimeError, OSError, MemoryError)
"""What loading may raise for such a reason, among others."""


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in NUMBERS:
        return True
    return isinstance(error, MemoryError) or (
        isinstance(error, LOADING_ERRORS) and any(text in str(error).lower() for text in TEXTS)
    )
