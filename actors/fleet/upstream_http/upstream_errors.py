"""Why an upstream could not be asked: by its own fault, or for want of something on this machine.

Raised by `upstream_connection.py` and `upstream_client.py`. What must always hold: no message has an address or a key,
since clients may read it; a shortage here is never an upstream's fault.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_NO_THREAD = "can't start new thread"
MAX_CAUSES = 64
"""Errors of one failure that are looked at."""


class UpstreamError(Exception):
    """An upstream did not answer, or with what is no HTTP. The message says why, after "it"."""

    is_unreachable = False
    """Nothing was heard of it: other requests would fare no better."""


class UpstreamUnreachable(UpstreamError):
    """No connection to an upstream could be made."""

    is_unreachable = True


class OwnShortage(Exception):
    """This machine has no file descriptor, thread or memory left to ask an upstream. Try again later."""


@contextmanager
def as_upstreams(why: str, kind: type[UpstreamError] = UpstreamError) -> Iterator[None]:
    """Raise whatever is raised in the block as an UpstreamError of this kind, or as an OwnShortage."""
    try:
        yield
    except (UpstreamError, OwnShortage):
        raise
    except Exception as error:
        if is_shortage(error):
            raise OwnShortage("file descriptors, threads or memory are short") from error
        raise kind(why) from error


def is_shortage(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that this machine lacks something."""
    found: list[BaseException] = [error]
    for seen in found:
        if isinstance(seen, MemoryError) or (isinstance(seen, RuntimeError) and _NO_THREAD in str(seen)):
            return True
        if isinstance(seen, socket.gaierror):  # it opens files, and does not say that it could not
            if _lacks_descriptors():
                return True
        elif isinstance(seen, OSError) and seen.errno in SHORTAGES:
            return True
        causes = [seen.__cause__, seen.__context__, *(seen.exceptions if isinstance(seen, BaseExceptionGroup) else ())]
        found += [cause for cause in causes if cause is not None and len(found) < MAX_CAUSES]
    return False


def _lacks_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in SHORTAGES
    return False
