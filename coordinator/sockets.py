"""How the coordinator's two sockets are set up: bounds, keepalives, keys, and who may reach them."""

from __future__ import annotations

import errno
import os
import socket as unix
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from coordinator import addresses
from coordinator.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.config import Limits, Security

#: Messages queued towards one peer before sends to it fail (control) or are dropped (outcomes).
SEND_QUEUE: Final = 10_000
#: ZMTP heartbeats notice a connection that a middlebox has cut silently.
HEARTBEAT_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000
#: A frame over the configured bound is answered with an error; one over this many times it closes
#: the connection, before it is read into memory.
HARD_FRAME_FACTOR: Final = 4


def router(context: zmq.Context[zmq.Socket[bytes]], limits: Limits) -> zmq.Socket[bytes]:
    """The control socket: a send to a peer that is gone or does not read fails, and never waits."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return _bounded(socket, limits)


def xpub(context: zmq.Context[zmq.Socket[bytes]], limits: Limits) -> zmq.Socket[bytes]:
    """The outcome socket; it tells every subscription, not only the first to a topic."""
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    return _bounded(socket, limits)


def bind(socket: zmq.Socket[bytes], address: str, key: str) -> str:
    """Bind and return the address as it is bound (a port 0 is resolved).

    A socket file is made for our user alone, and never taken from a coordinator that is running:
    libzmq would replace it without a word.

    Raises:
        ConfigError: the address cannot be bound; ``key`` names the setting it came from.

    """
    kind = addresses.transport(address)
    if kind == "ipc":
        _claim(Path(address.removeprefix("ipc://")), key)
    mask = os.umask(0o077)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        problem = f"{key}: cannot listen on {address}: {error}"
        raise ConfigError([problem]) from error
    finally:
        os.umask(mask)
    bound = bytes(socket.getsockopt(zmq.LAST_ENDPOINT))
    return bound.rstrip(b"\0").decode()


def authenticate(
    context: zmq.Context[zmq.Socket[bytes]], security: Security, sockets: list[zmq.Socket[bytes]]
) -> ThreadAuthenticator:
    """Demand CURVE keys on what ``sockets`` bind from now on; stop the result at the end.

    Raises:
        ConfigError: a key file cannot be used.

    """
    try:
        public, secret = zmq.auth.load_certificate(security.server_key)
        clients = zmq.auth.load_certificates(security.client_keys)
    except (OSError, ValueError) as error:
        raise ConfigError([f"security: {error}"]) from error
    if secret is None:
        raise ConfigError([f"security.server_key: {security.server_key} holds no secret key"])
    if not clients:
        raise ConfigError([f"security.client_keys: {security.client_keys} holds no public key file (*.key)"])
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=security.client_keys)
    for socket in sockets:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    return authenticator


def stop_authenticating(authenticator: ThreadAuthenticator) -> None:
    """End what ``authenticate`` has begun, also when its thread has died."""
    if not authenticator.is_alive():
        # To that one's pipe nobody listens any more: what is sent there, also by ``__del__``, waits for ever.
        authenticator.pipe.close(0)
        authenticator.pipe = None  # type: ignore[assignment]  # as its own ``stop`` does
    authenticator.stop()


def _bounded(socket: zmq.Socket[bytes], limits: Limits) -> zmq.Socket[bytes]:
    options = {
        zmq.LINGER: 0,
        zmq.SNDHWM: SEND_QUEUE,
        zmq.RCVHWM: SEND_QUEUE,
        zmq.MAXMSGSIZE: HARD_FRAME_FACTOR * limits.max_frame_bytes,
        zmq.IPV6: 1,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 10,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        zmq.HANDSHAKE_IVL: HEARTBEAT_TIMEOUT_MS,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


def _claim(path: Path, key: str) -> None:
    """Make the directory of a socket file, and see that nobody listens on that file.

    libzmq removes whatever is there: that must be a socket that nobody uses any more.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{key}: cannot make the directory {path.parent}: {error.strerror}"]) from error
    try:
        if path.exists() and not path.is_socket():
            raise ConfigError([f"{key}: {path} is there and is no socket; it would be removed"])
        with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
            problem = probe.connect_ex(str(path))
    except OSError as error:
        # A path that is too long has no errno.
        raise ConfigError([f"{key}: {path} cannot be used: {error.strerror or error}"]) from error
    if problem in {errno.EACCES, errno.EPERM}:
        raise ConfigError(
            [f"{key}: {path} belongs to another user, and cannot be used: {os.strerror(problem)}"]
        )
    if problem not in {errno.ENOENT, errno.ECONNREFUSED}:
        raise ConfigError([f"{key}: another process listens on {path} already"])
