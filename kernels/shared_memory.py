"""Memory in which a KV cache lies that other processes of this machine may map, to read its blocks where they are.

Used by backends whose `BackendConfig.shares_cache` is set. What is shared is a descriptor, which the engine hands to
its peers; they map it for themselves (`map_aligned`).

The system gives such memory small pages, with which a pass takes up to 7 % longer at long contexts. So it is made of
large ones piece by piece (`commit`), where the system can do that: from Linux 6.1 on, if
`/sys/kernel/mm/transparent_hugepage/shmem_enabled` is not `deny`. Elsewhere only small caches are shared.

What must always hold: the size is sealed, so that nobody who reads the memory can be killed by its being cut off; only
this process writes to it, as far as the system can see to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from typing import Final

import attrs

LARGE_PAGE: Final = 2 << 20
SMALL_CACHE: Final = 64 << 20
"""Up to here the size of pages makes no difference."""
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE: Final = 0x10
"""Forbids others to map the memory for writing. Linux 5.1; not in the standard library before Python 3.13."""
_MAP_FIXED: Final = 0x10
_MADV_COLLAPSE: Final = 25
_NOT_HERE: Final = (errno.ENOSYS, errno.EMFILE, errno.ENFILE, errno.EPERM, errno.EINVAL)

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@attrs.define(eq=False)
class SharedMemory:
    """Memory of this process, and what others map it by."""

    memory: memoryview
    descriptor: int | None
    """None: it is not shared any more."""
    address: int
    """A multiple of a large page."""

    def commit(self, address: int, num_bytes: int) -> bool:
        """Make what lies in this range of large pages, without changing it. Return whether all of it does.

        Nobody may write to any of the memory meanwhile.
        """
        begin = max(self.address, address // LARGE_PAGE * LARGE_PAGE)
        end = min(self.address + self.memory.nbytes, address + num_bytes)
        is_large = True
        for page in range(begin, end, LARGE_PAGE):
            at = page - self.address
            if at + LARGE_PAGE <= self.memory.nbytes:
                self.memory[at] = self.memory[at]  # a page of which nothing is used cannot be made large
                is_large &= _LIBC.madvise(page, LARGE_PAGE, _MADV_COLLAPSE) == 0
        return is_large

    def close(self) -> None:
        """Stop sharing. The memory stays as long as anything refers to it, here or in another process."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def share_memory(num_bytes: int) -> SharedMemory | None:
    """Return memory, all zeros, which is committed at its first use; None if the system has none that can be shared.

    Raises MemoryError.
    """
    try:
        descriptor = os.memfd_create("quipu-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return None
        raise MemoryError(str(error)) from error
    try:
        os.truncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        memory, address = map_aligned(descriptor, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        shared = SharedMemory(memory, descriptor, address)
        with contextlib.suppress(OSError):  # an older system: others could write, as they could to any of our memory
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"{num_bytes} bytes that can be shared: {error}") from error
    if num_bytes > SMALL_CACHE and not shared.commit(shared.address, LARGE_PAGE):
        shared.close()
        return None
    return shared


def map_aligned(descriptor: int, num_bytes: int, protection: int) -> tuple[memoryview, int]:
    """Map memory so that it begins with a large page, which a mapping elsewhere would divide into small ones.

    Return its address, too. Raises OSError.
    """
    reserved = mmap.mmap(-1, num_bytes + LARGE_PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    address = -(-start // LARGE_PAGE) * LARGE_PAGE
    # in the middle of what is reserved, which is unmapped as a whole once nothing refers to it
    if _LIBC.mmap(address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), "cannot be mapped")
    memory = memoryview(reserved)[address - start : address - start + num_bytes]
    return memory if protection & mmap.PROT_WRITE else memory.toreadonly(), address
