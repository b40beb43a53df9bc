"""The sockets of clients, and how each is set."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq
import zmq.auth

from coordinator.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.client.settings import ClientSettings

#: A ``Welcome`` brings a backlog; this bounds it, and what a wrong peer can make us hold.
_MAX_MESSAGE_BYTES: Final = 64 << 20

_lock = threading.Lock()
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


class Keys(NamedTuple):
    """CURVE keys: the coordinator's public one and our own pair."""

    server: bytes
    public: bytes
    secret: bytes


def load_keys(settings: ClientSettings) -> Keys | None:
    """Read the key files that ``settings`` names; None when it names none.

    Raises:
        ConfigError: one cannot be read, or ours holds no secret key or can be read by others.

    """
    if settings.server_key is None or settings.client_key is None:
        return None
    try:
        server, _ = zmq.auth.load_certificate(settings.server_key)
        public, secret = zmq.auth.load_certificate(settings.client_key)
        mode = stat.S_IMODE(settings.client_key.stat().st_mode)
    except (OSError, ValueError) as error:
        raise ConfigError([f"server_key, client_key: {error}"]) from error
    if secret is None:
        raise ConfigError([f"client_key: {settings.client_key} holds no secret key"])
    if mode & 0o077:
        problem = f"client_key: {settings.client_key} can be read by others (mode {mode:o}): chmod 600 it"
        raise ConfigError([problem])
    return Keys(server, public, secret)


def open_control(address: str, identity: bytes, keys: Keys | None) -> zmq.Socket[bytes]:
    """Connect a DEALER that calls itself ``identity``.

    Raises:
        ZMQError: the address cannot be used. The socket is closed.

    """
    socket = _open(zmq.DEALER, keys)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    # Nothing is queued for a coordinator that is not there: what to say is decided when it comes.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    return _connect(socket, address)


def open_outcomes(address: str, topic: bytes, keys: Keys | None) -> zmq.Socket[bytes]:
    """Connect a SUB that hears ``topic``.

    Raises:
        ZMQError: the address cannot be used. The socket is closed.

    """
    socket = _open(zmq.SUB, keys)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    return _connect(socket, address)


def _connect(socket: zmq.Socket[bytes], address: str) -> zmq.Socket[bytes]:
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket


def _open(kind: int, keys: Keys | None) -> zmq.Socket[bytes]:
    socket = _context().socket(kind)
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 10_000)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
    # A line that was cut without a word is noticed, also when nothing is said for long.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 5000)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return socket


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the one context of all clients of this process; an engine's own is left alone."""
    with _lock:
        # By process: a forked child must not touch its parent's.
        context = _contexts.get(os.getpid())
        if context is None:
            context = _contexts[os.getpid()] = zmq.Context()
        return context
