"""Bounds of what one client, or many, can take of the coordinator by being slow, silent or many.

A connection may be silent for a while, and no longer: that bounds the wait for its next request, the
time in which a request's head must be there, and the time in which an answer must be taken. Whoever
has been let in to follow the log has bounds of its own, see ``stream``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, cast

from aiohttp.http_exceptions import HttpProcessingError

from coordinator.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiohttp import web

#: Connections that are open at a time, followers of the log included.
MAX_CONNECTIONS: Final = 256
#: From when nobody serves it: how long a connection has to bring the next request's head.
IDLE_S: Final = 30.0
#: The head and the body of a request, and what was sent behind it before it was answered.
MAX_REQUEST_BYTES: Final = 128 << 10
#: After how long a host that does not answer any more is given up. The kernel sees to that.
DEAD_HOST_S: Final = 30

_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    b'{"error":"there are too many connections"}'
)

_log = get_logger()


class _NoMalformedRequests(logging.Filter):
    """Lets pass all but what a client has caused by sending what is no HTTP: it is told so itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


#: Where what speaks HTTP writes its log.
protocol_log: Final = logging.getLogger("coordinator.http")
protocol_log.addFilter(_NoMalformedRequests())


class Connections:
    """Makes the protocol of each connection, as ``create_server`` of the event loop wants it."""

    def __init__(self, serve: Callable[[], web.RequestHandler]) -> None:
        """Have ``serve()`` speak HTTP on each of them."""
        self._serve = serve
        self._open: dict[web.RequestHandler, _Connection] = {}
        self._full = False

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def __call__(self) -> asyncio.Protocol:
        """Serve a new connection, or turn it away."""
        full = len(self._open) >= MAX_CONNECTIONS
        if full and not self._full:
            _log.warning("http.full", connections=len(self._open))
        self._full = full
        if full:
            return _TurnedAway()
        handler = self._serve()
        connection = self._open[handler] = _Connection(handler, lambda: self._open.pop(handler, None))
        return connection

    @contextmanager
    def serving(self, request: web.Request) -> Iterator[None]:
        """Let no clock run on a request's connection: its head is there, and it is not answered yet."""
        connection = self._open.get(request.protocol)
        if connection is None:  # it is gone already
            yield
            return
        connection.stop_clock()
        try:
            yield
        finally:
            connection.start_clock()


class _Connection(asyncio.Protocol):
    """One connection: passes all on to what speaks HTTP, and looks at the time and the bytes."""

    def __init__(self, handler: web.RequestHandler, gone: Callable[[], object]) -> None:
        self._handler = handler
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._received_bytes = 0

    def start_clock(self) -> None:
        """From now on it is the client's turn."""
        self._received_bytes = 0
        self.stop_clock()
        if self._transport is not None:
            self._clock = asyncio.get_running_loop().call_later(IDLE_S, self._end, "silent")

    def stop_clock(self) -> None:
        """From now on it is ours."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _end(self, why: str) -> None:
        if self._transport is not None:
            _log.info("http.ended", why=why, peer=str(self._transport.get_extra_info("peername")))
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.start_clock()
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > MAX_REQUEST_BYTES:
            self._end("a request is too large")
        else:
            self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_clock()
        self._transport = None
        self._gone()
        self._handler.connection_lost(exc)


class _TurnedAway(asyncio.Protocol):
    """A connection too many: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        transport.write(_FULL)
        transport.close()


def give_up_dead_hosts(server: asyncio.Server) -> None:
    """Let the kernel end connections to hosts that do not answer; what is accepted inherits it."""
    for listening in server.sockets:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_HOST_S * 1000)
