"""Finds what a test run has left behind: processes, shared memory, sockets.

Other runs may go on beside this one, so only what belongs to this run counts: processes that carry its
mark in their environment, shared memory that no other process has mapped, files in its own directory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import psutil

#: In the environment of every process of this run.
MARK: Final = "KV_COORDINATOR_TEST_RUN"
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where the pools are, by design
_POOLS: Final = "kv-coordinator-*"


def processes(mark: str) -> list[psutil.Process]:
    """Every other process of this run, zombies included."""
    own = os.getpid()
    children = psutil.Process().children(recursive=True)
    marked = [
        process for process in psutil.process_iter() if process.pid != own and _is_marked(process, mark)
    ]
    return list({process.pid: process for process in (*children, *marked)}.values())


def pools() -> set[Path]:
    """Every KV pool in shared memory."""
    return set(_SHARED_MEMORY.glob(_POOLS))


def unused(paths: set[Path]) -> set[Path]:
    """Those of ``paths`` that exist and that no other process has mapped."""
    left = {path for path in paths if path.exists()}
    for process in psutil.process_iter():
        if left and process.pid != os.getpid():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:  # it has ended meanwhile, or is not ours to look at
                continue
            left = {path for path in left if str(path) not in maps}
    return left


def sockets(directory: Path) -> list[Path]:
    """Every socket file under ``directory``."""
    return [path for path in directory.rglob("*") if _is_socket(path)]


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):  # it has ended meanwhile, or is not ours to look at
        return False
