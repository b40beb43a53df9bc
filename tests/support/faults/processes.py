"""Processes that stand still, or are gone without a word."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.processes import Program


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP a process of ours for the length of a block: its sockets stay open, it does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: _state(pid) == "T", 10, f"{pid} stands still")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def kill(program: Program) -> None:
    """SIGKILL a program of ours; it is gone when this returns."""
    program.process.kill()
    program.wait()


def _state(pid: int) -> str:
    """The letter that the kernel has for it; the name before that, in parentheses, may be anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
