"""A piece of shared memory as a rank has it: a file in ``/dev/shm``, mapped here."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from backends.base import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFIX = "/dev/shm/kv-coordinator-"  # noqa: S108 - where pools are, by design


class SharedMemory:
    """A region that backends can register.

    Attributes:
        path: its file.
        bytes: its content, uint8; a view of the mapping.
        region: what to register.

    """

    def __init__(self, size_bytes: int, path: str = "") -> None:
        """Create it, filled with zeros; or map the one at ``path``, which its creator removes."""
        self._created = not path
        self.path = path or PREFIX + secrets.token_hex(16)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if self._created else 0)
        descriptor = os.open(self.path, flags, 0o600)
        try:
            if self._created:
                os.truncate(descriptor, size_bytes)
            self._mapping = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        if self._created:
            # Touched before use: the first scattered write into fresh pages is very slow.
            self.bytes[:] = 0
        self.region = Region(self.bytes.ctypes.data, size_bytes, path=self.path)

    @classmethod
    def random(cls, size_bytes: int, seed: int) -> Self:
        """Create one with random content."""
        memory = cls(size_bytes)
        memory.bytes[:] = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
        return memory

    def remove(self) -> None:
        """Remove the file; mappings stay usable until they are dropped."""
        if self._created:
            Path(self.path).unlink()
