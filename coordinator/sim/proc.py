"""What the kernel tells of processes: who started which, and how much memory each has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended; none when it is gone itself."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, thread.read_text("ascii").split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def private_bytes(pids: Iterable[int]) -> int:
    """Private memory of these processes that is in RAM; one that is gone has none.

    Pools lie in shared memory and do not count, for a page of one is in RAM once it was used.
    """
    return sum(_private_bytes(pid) for pid in pids)


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = next((line for line in lines if line.startswith("RssAnon:")), "RssAnon: 0 kB")
    return int(found.split()[1]) * 1024
