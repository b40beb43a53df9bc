"""Mapping a pool file.

A pool that other processes map is a file directly in ``/dev/shm``. Whoever maps one checks it
first: the path came from outside, and must not lead to any other memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Final

from backends.base import InvalidTransferError, Region
from backends.file_locks import Range, try_lock
from backends.memory import open_shared
from coordinator.errors import PoolBusyError, PoolError
from coordinator.worker.settings import POOL_PREFIX, is_pool_path

#: How long a worker waits for its predecessor to be dead, and how often it looks.
LOCK_S: Final = 10.0
LOCK_POLL_S: Final = 0.02
_LOCK_BYTES: Final = 1 << 60
#: Whatever ``lock_for`` may return lies in it.
LOCKS: Final = Range(0, 2 * _LOCK_BYTES)


def lock_for(instance: int) -> Range:
    """Return what a worker locks that sends for one life of a rank.

    All of these ranges overlap, so only one worker has the pool; and their lengths differ, so
    whoever meets the lock sees for which life its holder sends. Backends lock bytes behind them.
    """
    return Range(0, _LOCK_BYTES + instance % _LOCK_BYTES)


class MappedPool:
    """Another process's pool file, mapped here for reading and writing, and locked.

    The lock is the proof that no other worker sends from this pool: the kernel drops it when its
    holder is dead, and not before.

    Attributes:
        region: what to register with a backend.

    """

    def __init__(self, path: str, size_bytes: int, instance: int = 0) -> None:
        """Map the file, to send for the life ``instance`` of its owner.

        Raises:
            PoolError: it is not named as a pool, is not a regular file of our own user and of
                exactly ``size_bytes``, or cannot be mapped.
            PoolBusyError: it is locked for longer than ``LOCK_S``.

        """
        if not is_pool_path(path):
            message = f"{path!r} is not a pool: it must be named {POOL_PREFIX}<16 to 64 hexadecimal digits>"
            raise PoolError(message)
        descriptor = lock_pool(path, size_bytes, instance)
        try:
            self._memory = mmap.mmap(descriptor, size_bytes)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            message = f"the pool {path!r} of {size_bytes} bytes cannot be mapped: {error}"
            raise PoolError(message) from error
        self._descriptor = descriptor
        # The export keeps the mapping from being closed while a backend may use the address.
        self._export = ctypes.c_char.from_buffer(self._memory)
        self.region = Region(address=ctypes.addressof(self._export), size_bytes=size_bytes, path=path)

    def close(self) -> None:
        """Unmap the pool; the caller sees to it that no backend uses it any more."""
        del self._export
        self._memory.close()
        os.close(self._descriptor)


def lock_pool(path: str, size_bytes: int, instance: int) -> int:
    """Lock a pool's file, to send for the life ``instance`` of its owner.

    Returns a descriptor that the caller closes, and with it gives the lock back.

    Raises:
        PoolError: it is no such file.
        PoolBusyError: it is locked for longer than ``LOCK_S``.

    """
    try:
        descriptor = open_shared(path, size_bytes)
    except InvalidTransferError as error:
        message = f"the pool cannot be mapped: {error}"
        raise PoolError(message) from error
    try:
        _lock(descriptor, lock_for(instance))
    except PoolBusyError:
        os.close(descriptor)
        raise
    except OSError as error:
        os.close(descriptor)
        message = f"the pool {path!r} cannot be locked: {error}"
        raise PoolError(message) from error
    return descriptor


def _lock(descriptor: int, wanted: Range) -> None:
    """Wait until nobody else has the pool locked, and lock it."""
    deadline_s = time.monotonic() + LOCK_S
    while not try_lock(descriptor, wanted):
        if time.monotonic() >= deadline_s:
            message = f"the pool cannot be used: another worker has had it for {LOCK_S:g} s"
            raise PoolBusyError(message)
        time.sleep(LOCK_POLL_S)
