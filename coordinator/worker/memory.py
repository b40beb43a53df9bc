"""Pool files: how they are named, and mapping one.

A pool that other processes map is a file directly in ``/dev/shm``. Whoever maps one checks it
first: the path came from outside, and must not lead to any other memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import secrets
from typing import Final

from backends.base import InvalidTransferError, Region
from backends.memory import open_shared
from coordinator.errors import PoolError

_PREFIX: Final = "/dev/shm/kv-coordinator-"  # noqa: S108 - pools live there, created with O_EXCL
_POOL_PATH: Final = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{16,64}", re.ASCII)


def new_pool_path() -> str:
    """Return a path for a new pool file, which nothing has yet; create it with ``O_EXCL``."""
    return _PREFIX + secrets.token_hex(16)


def is_pool_path(path: str) -> bool:
    """Whether ``path`` is named as a pool file is; says nothing about what is there."""
    return _POOL_PATH.fullmatch(path) is not None


class MappedPool:
    """Another process's pool file, mapped here for reading and writing.

    Attributes:
        region: what to register with a backend.

    """

    def __init__(self, path: str, size_bytes: int) -> None:
        """Map the file.

        Raises:
            PoolError: it is not named as a pool, is not a regular file of our own user and of
                exactly ``size_bytes``, or cannot be mapped.

        """
        if not is_pool_path(path):
            message = f"{path!r} is not a pool: it must be named {_PREFIX}<16 to 64 hexadecimal digits>"
            raise PoolError(message)
        try:
            descriptor = open_shared(path, size_bytes)
        except InvalidTransferError as error:
            message = f"the pool cannot be mapped: {error}"
            raise PoolError(message) from error
        try:
            self._memory = mmap.mmap(descriptor, size_bytes)
        except (OSError, ValueError) as error:
            message = f"the pool {path!r} of {size_bytes} bytes cannot be mapped: {error}"
            raise PoolError(message) from error
        finally:
            os.close(descriptor)
        # The export keeps the mapping from being closed while a backend may use the address.
        self._export = ctypes.c_char.from_buffer(self._memory)
        self.region = Region(address=ctypes.addressof(self._export), size_bytes=size_bytes, path=path)

    def close(self) -> None:
        """Unmap the pool; the caller sees to it that no backend uses it any more."""
        del self._export
        self._memory.close()
