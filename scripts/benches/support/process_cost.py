"""What a process costs: CPU time and memory; and the two cores that all costs are for."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_libc = ctypes.CDLL(None, use_errno=True)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, user and system, all its threads; to the nanosecond.

    Raises:
        ProcessLookupError: there is no such process.

    """
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock))
    if error:
        raise ProcessLookupError(error, os.strerror(error))
    return time.clock_gettime(clock.value)


def rss_bytes(pid: int) -> int:
    """Memory of a process that is in RAM now.

    Raises:
        FileNotFoundError: there is no such process.

    """
    _, resident, *_ = Path(f"/proc/{pid}/statm").read_text("ascii").split()
    return int(resident) * os.sysconf("SC_PAGESIZE")


@contextmanager
def two_cores() -> Iterator[None]:
    """Confine this process, and whatever it starts, to two of its cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
