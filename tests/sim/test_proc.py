"""What the kernel tells of processes."""

from __future__ import annotations

import os
import subprocess
import sys

from coordinator.sim.proc import children, private_bytes

MIB = 1 << 20


def test_children_and_what_they_keep_for_themselves_are_seen() -> None:
    hold = f"x = bytearray({64 * MIB}); x[::4096] = b'1' * len(x[::4096]); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold], **pipes) as child:  # type: ignore[call-overload] # pipes are pipes
        try:
            child.stdout.readline()
            assert child.pid in children(os.getpid())
            assert 64 * MIB < private_bytes([child.pid]) < 128 * MIB
        finally:
            child.kill()
            child.wait()
    assert child.pid not in children(os.getpid())


def test_who_is_gone_has_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert children(child.pid) == []
    assert private_bytes([child.pid]) == 0
