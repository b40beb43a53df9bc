"""A worker's own loop: control socket, reports, signs of life; the same in both hostings.

The thread that runs it does nothing that blocks: it takes commands, hands on reports and gives a sign
of life. The backend's calls are made in the lanes' threads.
"""

from __future__ import annotations

import logging
import math
import time
from enum import Enum
from typing import TYPE_CHECKING, Final

import zmq

from coordinator import frames as wire
from coordinator import messages
from coordinator.errors import ProtocolError
from coordinator.messages import Commands, Refused, Reports, Stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.messages import WorkerHello
    from coordinator.worker.host import WorkerHost
    from coordinator.worker.outbox import Outbox

#: Larger than any message with commands.
MAX_COMMANDS_BYTES: Final = 64 << 20
#: Frames taken from the socket before reports are looked after.
_FRAMES_PER_TURN: Final = 64

_log = logging.getLogger(__name__)


class End(Enum):
    """Why a loop has ended."""

    #: The coordinator said so.
    STOPPED = "stopped"
    #: The coordinator does not know this worker (any more).
    REFUSED = "refused"
    #: Whoever runs the worker said so.
    CALLED = "called"


class ControlLoop:
    """Serves one connection to the coordinator."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        hello: WorkerHello,
        host: WorkerHost,
        outbox: Outbox,
        heartbeat_s: float,
    ) -> None:
        """Serve ``socket``, which stays the caller's; ``hello`` is the first message on it."""
        self._socket = socket
        self._host = host
        self._outbox = outbox
        self._heartbeat_s = heartbeat_s
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(outbox.fileno(), zmq.POLLIN)
        self._calls: dict[object, Callable[[], bool]] = {}
        # A message that the socket did not take yet.
        self._pending = messages.encode(hello)
        self._blocked = False
        self._ended: End | None = None
        self._sign_due_s = 0.0

    def listen(self, source: int | zmq.Socket[bytes], ends: Callable[[], bool]) -> None:
        """Whenever ``source`` is readable ask ``ends``, which reads it, whether this is the end."""
        self._poller.register(source, zmq.POLLIN)
        self._calls[source] = ends

    def run(self) -> End:
        """Serve until told to end; why."""
        self._send()
        while self._ended is None:
            wait_s = max(0.0, self._sign_due_s - time.monotonic())
            events = dict(self._poller.poll(math.ceil(1000 * wait_s)))
            if self._socket in events:
                self._receive()
            if self._outbox.fileno() in events:
                self._outbox.rest()
            if any(ends() for source, ends in self._calls.items() if source in events):
                self._ended = End.CALLED
            self._send()
        return self._ended

    def _receive(self) -> None:
        """Take what has arrived, within reason."""
        for _ in range(_FRAMES_PER_TURN):
            frames = wire.receive(self._socket)
            if frames is None:
                return
            # Asked before a lane is woken: from then on it waits for the interpreter until we sleep.
            has_more = wire.waiting(self._socket)
            try:
                self._obey(frames)
            except ProtocolError as error:
                _log.error("ignored from the coordinator: %s", error)
            if not has_more:
                return

    def _obey(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            message = f"a message of {len(frames)} frames"
            raise ProtocolError(message)
        match messages.decode_to_worker(frames[0]):
            case Commands(items=items):
                self._host.obey(items)
            case Refused(message=message):
                _log.error("refused by the coordinator: %s", message)
                self._ended = End.REFUSED
            case Stop():
                self._ended = End.STOPPED

    def _send(self) -> None:
        """Send reports, or a sign of life when one is due, as far as the socket takes them."""
        while True:
            if not self._pending:
                reports = self._outbox.take(messages.MAX_ITEMS)
                if not reports and time.monotonic() < self._sign_due_s:
                    return
                self._pending = messages.encode(Reports(reports))
            try:
                wire.send(self._socket, [self._pending])
            except zmq.Again:
                self._blocked = True
                self._poller.modify(self._socket, zmq.POLLIN | zmq.POLLOUT)
                self._sign_due_s = time.monotonic() + self._heartbeat_s
                return
            if self._blocked:
                self._blocked = False
                self._poller.modify(self._socket, zmq.POLLIN)
            self._pending = b""
            self._sign_due_s = time.monotonic() + self._heartbeat_s
