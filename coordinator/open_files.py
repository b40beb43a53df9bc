"""Lets this process have as many open files as its host allows it.

Each rank has two connections, each of a descriptor. The usual limit of 1,024 is for programs that use
``select``, which cannot name more; nothing here does. Beyond the limit libzmq 4.3.5 ends the whole process
when somebody connects to a socket file.
"""

from __future__ import annotations

import resource


def allow() -> int:
    """Raise the limit, also for the processes that are started from here on; returns what it is now."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
