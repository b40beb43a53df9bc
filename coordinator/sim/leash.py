"""Ends this process when its parent ends, however that ended.

``python -m coordinator.sim.leash PARENT ARGUMENTS`` is ``kv-coordinator ARGUMENTS`` on a leash.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def follow(parent: int) -> None:
    """Get SIGKILL when ``parent``, the thread of it that started us, ends; exit when it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Run the command line on a leash."""
    from coordinator import cli  # noqa: PLC0415 - only this use of the module needs it

    parent, *arguments = sys.argv[1:]
    follow(int(parent))
    sys.argv[1:] = arguments
    cli.main()


if __name__ == "__main__":
    main()
