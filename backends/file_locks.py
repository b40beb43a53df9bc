"""Locks on ranges of a file, which the kernel drops when their holder is dead, and not before.

They are open-file-description locks: one belongs to a descriptor, whoever opens the file anew meets
it, in this process too, and it does not meet ``flock`` or the plain locks of ``lockf``. What a range
means, and that it lies far beyond the end of the file, is for those who use it to agree upon.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final, NamedTuple

_FLOCK: Final = struct.Struct("hhqqi")


class Range(NamedTuple):
    """Bytes of a file; they need not exist."""

    start: int
    length: int


def try_lock(descriptor: int, wanted: Range, *, shared: bool = False) -> bool:
    """Take a lock, or say that somebody has one that excludes it.

    Raises:
        OSError: the descriptor or the range cannot be used.

    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(kind, wanted))
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int, held: Range) -> None:
    """Give a lock back; without one nothing happens."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, held))


def holder(descriptor: int, wanted: Range) -> Range | None:
    """Return the range that somebody else has locked, which would exclude ours; None when nobody has."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, wanted))
    kind, _, start, length, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else Range(start, length)


def _request(kind: int, wanted: Range) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, wanted.start, wanted.length, 0)
