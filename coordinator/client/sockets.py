"""The sockets of clients, and how each is set."""

from __future__ import annotations

import os
import threading
from typing import Final

import zmq

#: A ``Welcome`` brings a backlog; this bounds it, and what a wrong peer can make us hold.
_MAX_MESSAGE_BYTES: Final = 64 << 20

_lock = threading.Lock()
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def open_control(address: str, identity: bytes) -> zmq.Socket[bytes]:
    """Connect a DEALER that calls itself ``identity``.

    Raises:
        ZMQError: the address cannot be used. The socket is closed.

    """
    socket = _open(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    # Nothing is queued for a coordinator that is not there: what to say is decided when it comes.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    return _connect(socket, address)


def open_outcomes(address: str, topic: bytes) -> zmq.Socket[bytes]:
    """Connect a SUB that hears ``topic``.

    Raises:
        ZMQError: the address cannot be used. The socket is closed.

    """
    socket = _open(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    return _connect(socket, address)


def _connect(socket: zmq.Socket[bytes], address: str) -> zmq.Socket[bytes]:
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket


def _open(kind: int) -> zmq.Socket[bytes]:
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
    return socket


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the one context of all clients of this process; an engine's own is left alone."""
    with _lock:
        # By process: a forked child must not touch its parent's.
        context = _contexts.get(os.getpid())
        if context is None:
            context = _contexts[os.getpid()] = zmq.Context()
        return context
