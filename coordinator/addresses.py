"""ZeroMQ addresses: what is one, who can reach it, and what peers are told."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

#: A socket's path must fit into ``sockaddr_un`` with a closing zero.
MAX_IPC_BYTES: Final = 107
_MAX_PORT: Final = 65535
_TCP: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+|\*):(?P<port>[0-9]{1,5})")
_WILDCARDS: Final = {"*", "0.0.0.0", "[::]"}  # noqa: S104 - recognised here, bound nowhere


@dataclass(frozen=True, slots=True)
class Address:
    """An address, taken apart.

    Attributes:
        transport: ``"ipc"`` or ``"tcp"``.
        host: for tcp, as written; an IPv6 address keeps its brackets.
        port: for tcp; 0 means any free one.
        path: for ipc; absolute.

    """

    transport: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def wildcard(self) -> bool:
        """Whether it listens on every interface, so that it names no host to connect to."""
        return self.host in _WILDCARDS

    @property
    def local(self) -> bool:
        """Whether only processes on this host can reach it."""
        if self.transport == "ipc" or self.host == "localhost":
            return True
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def split(text: str) -> Address:
    """Take an address apart.

    Raises:
        ValueError: it is none; the text completes "is ...".

    """
    transport, separator, rest = text.partition("://")
    if not separator or transport not in {"ipc", "tcp"}:
        message = f"{text!r}, must be ipc:///absolute/path or tcp://host:port"
        raise ValueError(message)
    if transport == "ipc":
        return Address("ipc", path=_checked_path(text, rest))
    match = _TCP.fullmatch(rest)
    if match is None or int(match["port"]) > _MAX_PORT:
        message = (
            f"{text!r}, must be tcp://host:port with a port from 0 to {_MAX_PORT}; "
            "an IPv6 address stands in brackets"
        )
        raise ValueError(message)
    return Address("tcp", host=match["host"], port=int(match["port"]))


def advertised(endpoint: str, host: str) -> str:
    """Return what peers connect to: ``endpoint``, with ``host`` in place of a wildcard."""
    address = split(endpoint)
    if not address.wildcard or not host:
        return endpoint
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{address.port}"


def transport(text: str) -> str:
    """Return the part of an address before ``://``."""
    return text.partition("://")[0]


def _checked_path(text: str, path: str) -> str:
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        message = f"{text!r}, must be ipc:// and the absolute path of a file, as in ipc:///run/x/control"
        raise ValueError(message)
    size = len(path.encode())
    if size > MAX_IPC_BYTES:
        message = f"a path of {size} bytes, must be at most {MAX_IPC_BYTES}: {text!r}"
        raise ValueError(message)
    return path
