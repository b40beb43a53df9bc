"""The sockets of native engines in this process, as the kernel shows them; Mooncake's module does not.

Three things are wanted: how many connections an engine has; that they are kept alive; and that its thread
which waits for handshakes wakes often. An engine has an event loop of its own: an epoll instance that waits
for the listening socket of its data port and for all of its connections. ``/proc`` says for what an epoll
instance waits (proc_pid_fdinfo(5)).

All other descriptors of the process are left as they are. Other threads open and close theirs meanwhile, so
none is made a Python socket (which may change its mode, and closes it) or duplicated (an event loop hears of
a connection that it has closed, as long as there is a duplicate).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backends.base import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DESCRIPTORS: Final = "/proc/self/fd"
_DETAILS: Final = Path("/proc/self/fdinfo")
_EPOLL: Final = "anon_inode:[eventpoll]"
#: What Mooncake listens on.
_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound here
#: Length of a ``sockaddr_in6``, the longest that is looked at.
_ADDRESS_BYTES: Final = 28
#: After this long without a byte the kernel asks the other end: firewalls forget what is silent.
_KEEP_ALIVE_S: Final = 60

_libc: Final = ctypes.CDLL(None, use_errno=True)


def all_sockets() -> frozenset[str]:
    """The names that the kernel gives to the sockets of this process; none is ever given twice.

    Raises:
        BackendError: no file can be opened.

    """
    with _told():
        return frozenset(name for _, name in _descriptors() if name.startswith("socket:"))


class EngineSockets:
    """The sockets of the engine that was made just now.

    Attributes:
        data_port: where it takes data.

    """

    def __init__(self, before: frozenset[str], handshake_port: int) -> None:
        """Find them.

        Args:
            before: ``all_sockets()``, from before the engine was made.
            handshake_port: where it waits for handshakes.

        Raises:
            BackendError: they are not found, or no file can be opened.

        """
        with _told():
            found = list(_descriptors())
            new = {fd: name for fd, name in found if name.startswith("socket:") and name not in before}
            loops = [(fd, port) for fd, name in found if name == _EPOLL for port in _data_ports(fd, new)]
            handshakes = [fd for fd in new if _wildcard_port(fd) == handshake_port]
        if len(loops) != 1 or len(handshakes) != 1:
            message = f"the engine's sockets are not found ({len(loops)} loops, {len(handshakes)} listeners)"
            raise BackendError(message)
        ((self._loop, self.data_port),) = loops
        (self._handshakes,) = handshakes

    def set_accept_timeout(self, timeout_s: float) -> None:
        """Let the thread that waits for handshakes wake this often."""
        timeout = struct.pack("ll", *divmod(int(timeout_s * 1e6), 1_000_000))
        _libc.setsockopt(self._handshakes, socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout, len(timeout))

    def connections(self, host: str, port: int) -> list[int]:
        """The descriptors of its connections to ``host:port``, which stand.

        Raises:
            BackendError: no file can be opened.

        """
        with _told():
            return [fd for fd in _awaited(self._loop) if _address(_libc.getpeername, fd) == (host, port)]


def keep_alive(descriptor: int) -> None:
    """Have the kernel ask the other end of a connection now and then."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S),
    ):
        _libc.setsockopt(descriptor, level, option, struct.pack("i", value), struct.calcsize("i"))


def _descriptors() -> Iterator[tuple[int, str]]:
    """Our descriptors, and what they are."""
    for descriptor in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - much faster; there may be thousands
        with contextlib.suppress(FileNotFoundError):
            yield int(descriptor), os.readlink(f"{_DESCRIPTORS}/{descriptor}")  # noqa: PTH115 - as above


def _awaited(epoll: int) -> list[int]:
    """The descriptors for which an epoll instance waits; none when it is gone."""
    with contextlib.suppress(FileNotFoundError):
        lines = (_DETAILS / str(epoll)).read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return []


def _data_ports(epoll: int, new: dict[int, str]) -> list[int]:
    """The ports of the new sockets on which an epoll instance waits for callers, on all addresses."""
    ports = (_wildcard_port(descriptor) for descriptor in _awaited(epoll) if descriptor in new)
    return [port for port in ports if port]


def _wildcard_port(descriptor: int) -> int:
    """On which port a socket listens on all addresses; 0 when it does not."""
    address = _address(_libc.getsockname, descriptor)
    listens, size_bytes = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    _libc.getsockopt(
        descriptor,
        socket.SOL_SOCKET,
        socket.SO_ACCEPTCONN,
        ctypes.byref(listens),
        ctypes.byref(size_bytes),
    )
    return address[1] if address and address[0] in _WILDCARDS and listens.value else 0


def _address(call: Callable[..., int], descriptor: int) -> tuple[str, int] | None:
    """One end of a TCP socket, as ``getsockname`` or ``getpeername`` tells; ``None``: it has none."""
    buffer, size_bytes = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint(_ADDRESS_BYTES)
    if call(descriptor, buffer, ctypes.byref(size_bytes)) != 0:
        return None
    raw = buffer.raw
    family, port = int.from_bytes(raw[:2], sys.byteorder), int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET:
        return socket.inet_ntop(family, raw[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, raw[8:24]), port
    return None


@contextmanager
def _told() -> Iterator[None]:
    """Turn the errors of ``/proc`` into ours."""
    try:
        yield
    except OSError as error:
        message = f"the engine's sockets cannot be looked at: {error}"
        raise BackendError(message) from error
