"""A ZeroMQ socket inside the event loop, without ``zmq.asyncio``.

``zmq.asyncio`` loses messages when a ``recv`` is cancelled and costs ten times as much per message.
Here the loop watches the socket's file descriptor, which is edge-triggered: after every wake, and
after every send (a send can swallow the edge), the socket is drained until it would block.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Final

import zmq

from coordinator import frames as wire

if TYPE_CHECKING:
    from collections.abc import Callable

#: Messages handled per wake, and for how long, before timers and other sockets get their turn.
BATCH: Final = 256
TURN_S: Final = 0.005


class Channel:
    """Owns one socket; hands every incoming message, as a list of frames, to ``on_message``.

    ``on_message`` must not raise: an exception in it is a bug and reaches the loop's handler, after
    which the channel goes on with the next message.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        """Take ownership of ``socket``; call ``start`` inside the running loop."""
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._closed = False

    def start(self) -> None:
        """Begin to read."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)
        self._wake()

    def send(self, frames: list[bytes]) -> bool:
        """Send without waiting; False when the peer is gone, its queue is full, or we are closed."""
        if self._closed:
            return False
        try:
            wire.send(self._socket, frames)
        except zmq.ZMQError as error:
            if error.errno in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                return False
            raise
        finally:
            self._wake()
        return True

    def close(self) -> None:
        """Stop reading and close the socket; what is queued to peers may be lost after ``linger``."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        self._socket.close()

    def _is_closed(self) -> bool:
        # A message may have closed us.
        return self._closed

    def _wake(self) -> None:
        if not self._scheduled and self._loop is not None and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        # After a send there is rarely anything.
        if self._is_closed() or not wire.waiting(self._socket):
            return
        # Not the loop's clock: uvloop's stands still while a callback runs.
        until_s = monotonic() + TURN_S
        for _ in range(BATCH):
            frames = wire.receive(self._socket)
            if frames is None:
                return
            try:
                self._on_message(frames)
            except BaseException:
                # The edge is spent: without another look, what is queued behind would wait for ever.
                self._wake()
                raise
            if self._is_closed():
                return
            if monotonic() > until_s:
                break
        self._wake()
