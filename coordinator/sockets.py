"""How the coordinator's two sockets are set up: bounds, keepalives, keys, and who may reach them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from coordinator import addresses
from coordinator.errors import ConfigError
from coordinator.socket_files import SocketFile

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


def bind(socket: zmq.Socket[bytes], address: str, key: str, files: list[SocketFile]) -> str:
    """Bind and return the address as it is bound (a port 0 is resolved).

    A socket file is added to ``files``; it is the caller's to remove.

    Raises:
        ConfigError: the address cannot be bound; ``key`` names the setting it came from.

    """
    try:
        if addresses.transport(address) == "ipc":
            files.append(SocketFile(Path(address.removeprefix("ipc://")), key))
            _bind_file(socket, address, files[-1])
        else:
            socket.bind(address)
    except zmq.ZMQError as error:
        problem = f"{key}: cannot listen on {address}: {error}"
        raise ConfigError([problem]) from error
    bound = bytes(socket.getsockopt(zmq.LAST_ENDPOINT))
    return bound.rstrip(b"\0").decode()


def _bind_file(socket: zmq.Socket[bytes], address: str, file: SocketFile) -> None:
    socket.setsockopt(zmq.USE_FD, file.listener.fileno())
    try:
        socket.bind(address)
        file.listener.detach()
    finally:
        socket.setsockopt(zmq.USE_FD, -1)


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
