"""A process that the kernel takes apart is known as such before its pidfd tells (case C10)."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from coordinator.deaths import is_ending, readable
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.processes import Programs

#: Its name looks like the end of a name, and is no ASCII.
_PROGRAM = (
    "import ctypes, sys\n"
    "ctypes.CDLL(None).prctl(15, ') 4 ü'.encode(), 0, 0, 0)\n"
    "print('named', flush=True)\n"
    "sys.stdin.read()\n"
    "import signal; signal.pause()\n"
)


def test_only_a_process_that_was_killedis_ending(programs: Programs) -> None:
    program = programs.python("-c", _PROGRAM)
    program.says("named")
    pid = program.process.pid
    assert not is_ending(pid)
    pidfd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGSTOP)
        assert not is_ending(pid)
        os.kill(pid, signal.SIGKILL)
        # It is not reaped yet: whenever the pidfd tells, the flag has been there before.
        eventually(lambda: readable(pidfd))
        assert is_ending(pid)
    finally:
        os.close(pidfd)
    program.wait()
    assert not is_ending(pid)
