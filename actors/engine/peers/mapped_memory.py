"""Memory that the engines of one machine share: buffers that the server of a connection makes, and whole caches.

Used by the links that can pass descriptors on. A cache's memory is made by its backend (`kernels/shared_memory.py`).

What must always hold: nobody touches memory that its owner could take away.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

from quipu.kernels.shared_memory import map_aligned

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class NotSealed(ValueError):
    """The memory could be cut off, which would kill whoever reads it."""


def make_sealed(num_bytes: int) -> int:
    """Return a descriptor of new memory. Raises OSError."""
    descriptor = os.memfd_create("quipu-peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_sealed(descriptor: int, num_bytes: int, *, is_writable: bool = False) -> memoryview:
    """Map memory that came from elsewhere. Raises NotSealed, OSError and ValueError."""
    is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not is_sealed or os.fstat(descriptor).st_size < num_bytes:
        raise NotSealed("the peer's memory can be cut off")
    memory, _ = map_aligned(descriptor, num_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0))
    return memory
