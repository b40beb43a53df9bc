"""The sockets of native engines in this process, as the kernel shows them; Mooncake's module does not.

Three things are wanted: on which port an engine takes data; how many connections it has; and that its
thread which listens for handshakes wakes often. An engine has an event loop of its own: an epoll instance
that waits for the listening socket of its data port and for all of its connections. ``/proc`` says for what
an epoll instance waits (proc_pid_fdinfo(5)).

Other threads open and close descriptors meanwhile. None is duplicated here: an event loop would go on
to hear of a connection that it has closed, for as long as the duplicate is there.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_DESCRIPTORS: Final = Path("/proc/self/fd")
_DETAILS: Final = Path("/proc/self/fdinfo")
_SOCKET: Final = "socket:"
_EPOLL: Final = "anon_inode:[eventpoll]"
#: What Mooncake listens on.
_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound here


def wildcard_ports() -> set[int]:
    """The TCP ports on which this process listens on all of its addresses."""
    ports = (_wildcard_port(descriptor) for descriptor in _named(_SOCKET))
    return {port for port in ports if port}


def connections(data_port: int, host: str, port: int) -> int:
    """How many connections to ``host:port`` that engine has which takes data on ``data_port``."""
    for epoll in _named(_EPOLL):
        awaited = _awaited(epoll)
        if any(_wildcard_port(descriptor) == data_port for descriptor in awaited):
            return sum(_far_end(descriptor) == (host, port) for descriptor in awaited)
    return 0


def set_accept_timeout(port: int, timeout_s: float) -> bool:
    """Let the thread that waits for callers on ``port`` wake this often; whether there is such a port."""
    timeout = struct.pack("ll", *divmod(int(timeout_s * 1e6), 1_000_000))
    for descriptor in _named(_SOCKET):
        if _wildcard_port(descriptor) == port:
            with _opened(descriptor) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                return True
    return False


def _named(kind: str) -> Iterator[int]:
    """Our descriptors of one kind."""
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(kind):
                yield int(entry.name)


def _awaited(epoll: int) -> list[int]:
    """The descriptors for which an epoll instance waits; none when it is gone."""
    with contextlib.suppress(OSError):
        lines = (_DETAILS / str(epoll)).read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return []


def _wildcard_port(descriptor: int) -> int:
    """On which port it listens on all addresses; 0 when it does not."""
    with contextlib.suppress(OSError), _opened(descriptor) as candidate:
        if candidate.family in (socket.AF_INET, socket.AF_INET6):
            host, port = candidate.getsockname()[:2]
            listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return int(port) if listens and host in _WILDCARDS else 0
    return 0


def _far_end(descriptor: int) -> tuple[str, int] | None:
    """Where an IPv4 connection leads; ``None`` when it is none, or not yet, or no more."""
    with contextlib.suppress(OSError), _opened(descriptor) as candidate:
        if candidate.family == socket.AF_INET:
            host, port = candidate.getpeername()
            return str(host), int(port)
    return None


@contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    """A descriptor that is not ours, as a socket; it is not closed.

    Raises:
        OSError: it is none.

    """
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
