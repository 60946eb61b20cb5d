"""Errors of requests to upstreams: faults of the upstream, and shortages on this machine.

Raised by `upstream_connection.py` and `upstream_client.py`. What must always hold: no message has an address or a key,
since clients may read it; a shortage on this machine never counts as an upstream's fault.
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
"""Maximum number of chained errors that are examined."""


class UpstreamError(Exception):
    """An upstream did not answer, or not with valid HTTP. The message says why, as a predicate of "it"."""

    is_unreachable = False
    """The upstream did not respond at all, so other requests to it would fail as well."""


class UpstreamUnreachable(UpstreamError):
    """No connection to an upstream could be opened."""

    is_unreachable = True


class OwnShortage(Exception):
    """This machine has no file descriptor, thread or memory left for an upstream request. Try again later."""


@contextmanager
def as_upstreams(why: str, kind: type[UpstreamError] = UpstreamError) -> Iterator[None]:
    """Turn any error in the block into an UpstreamError of this kind, or into an OwnShortage."""
    try:
        yield
    except (UpstreamError, OwnShortage):
        raise
    except Exception as error:
        if is_shortage(error):
            raise OwnShortage("file descriptors, threads or memory are short") from error
        raise kind(why) from error


def is_shortage(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, shows a shortage on this machine."""
    found: list[BaseException] = [error]
    for seen in found:
        if isinstance(seen, MemoryError) or (isinstance(seen, RuntimeError) and _NO_THREAD in str(seen)):
            return True
        if isinstance(seen, socket.gaierror):  # name resolution opens files, and hides its failure to do so
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
