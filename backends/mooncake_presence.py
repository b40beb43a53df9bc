"""Which incarnation of a peer is there: a small TCP conversation beside Mooncake's own.

Mooncake knows a peer by host and port only. It connects again by itself, and so it writes into
whatever process listens there next. Its errors do not say whether the peer is gone, either.

So the receiving side has an *incarnation*, 16 random bytes, and a port of its own, on which a thread
answers. A link keeps one connection to it as long as it lives. It was opened with the incarnation's
bytes, and no later process can hold its other end: while it stands the peer is the same process,
and its kernel says when it is not. Kernel probes show the loss of a whole host, or of the way to it.

The conversation: the link says 16 bytes; the other side says ``+`` when that is its incarnation, else
it hangs up; before it does that it says ``-`` when its process cannot open the files for another sender.
Every byte that follows is answered by another ``+``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import select
import selectors
import socket
import threading
import time
from contextlib import ExitStack
from typing import Final

from backends.base import BackendError

logger = logging.getLogger(__name__)

#: Length of an incarnation.
INCARNATION_BYTES: Final = 16
_YES: Final = b"+"
_NO_ROOM: Final = b"-"
#: What an answer to the greeting means; the empty one is that it hangs up.
_PROBLEMS: Final = {
    _YES: "",
    _NO_ROOM: "lets nobody in any more: it may not open more files, see its log",
    b"": "is another incarnation; its endpoint is outdated",
}
_MUTE: Final = b"m"
#: What the process may open besides, while a caller makes its connections.
_SPARE_FILES: Final = 32
_ASK: Final = b"?"
#: Links that one receiving side answers at a time.
_MAX_CALLERS: Final = 4096
#: Whoever has not said the incarnation by then gives way to others.
_GREETING_S: Final = 5.0
_CHUNK_BYTES: Final = 64
#: The kernel asks a silent host this often.
_KEEPALIVE_S: Final = 1
_PAUSE_S: Final = 0.1
_JOIN_S: Final = 5.0


class Presence:
    """The sending side's connection. Not thread-safe.

    Attributes:
        answers: how many questions were answered, as of the last ``lost``.

    """

    def __init__(
        self, host: str, port: int, incarnation: bytes, timeout_s: float, lost_after_s: float
    ) -> None:
        """Call the peer and wait for its answer.

        Args:
            host: where it is.
            port: its port for this.
            incarnation: the one that is wanted.
            timeout_s: how long it may take until the answer is there.
            lost_after_s: a host that acknowledges nothing for this long counts as lost.

        Raises:
            BackendError: it cannot be reached, does not answer, or is another incarnation.

        """
        where = f"{host}:{port}"
        self.answers = 0
        self._asked = 0
        self._lost = ""
        end_s = time.monotonic() + timeout_s
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            message = f"{where}: {error}"
            raise BackendError(message) from error
        try:
            self._tune(lost_after_s)
            self._socket.sendall(incarnation)
            self._socket.settimeout(max(0.001, end_s - time.monotonic()))
            problem = _PROBLEMS.get(self._socket.recv(1), "is no presence of mooncake")
            self._socket.settimeout(0)
        except TimeoutError:
            problem = f"did not answer within {timeout_s:g} s"
        except OSError as error:
            problem = f"hung up: {error}"
        if problem:
            self._socket.close()
            message = f"{where} {problem}"
            raise BackendError(message)

    def _tune(self, lost_after_s: float) -> None:
        """Send at once, and notice a host that is gone."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_after_s * 1000))

    def ask(self) -> int:
        """Put a question; it is answered when ``answers`` has reached the number returned."""
        self._asked += 1
        # What is wrong, if it cannot be sent, ``lost`` finds out; else the answer will be missed.
        with contextlib.suppress(OSError):
            self._socket.send(_ASK)
        return self._asked

    def confirm(self, timeout_s: float) -> None:
        """Ask, and wait for the answer.

        Raises:
            BackendError: there is none within ``timeout_s``, or it has hung up.

        """
        wanted, end_s = self.ask(), time.monotonic() + timeout_s
        # It needs no descriptor of its own, of which there may be none left.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self.lost() and self.answers < wanted:
            if not poll.poll(1000 * max(0.0, end_s - time.monotonic())):
                message = f"it did not answer within {timeout_s:g} s"
                raise BackendError(message)
        if self._lost:
            raise BackendError(self._lost)

    def lost(self) -> str:
        """Say why the incarnation is gone; empty while it is there, as far as our kernel knows."""
        while not self._lost:
            try:
                answer = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._lost = f"its connection is broken ({error.strerror})"
            else:
                self.answers += len(answer)
                if not answer:
                    self._lost = "it has closed its connection"
        return self._lost

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class _Caller:
    """A connection on the receiving side."""

    __slots__ = ("greeting", "since_s", "socket")

    def __init__(self, caller: socket.socket) -> None:
        self.socket = caller
        self.greeting = b""
        self.since_s = time.monotonic()

    def greeted(self) -> bool:
        return len(self.greeting) == INCARNATION_BYTES


class PresenceListener:
    """The receiving side: a port, and the thread that answers there.

    Attributes:
        incarnation: ours.
        port: where we answer.

    """

    def __init__(self, host: str, files: int) -> None:
        """Listen on an address of this host.

        Args:
            host: the address.
            files: how many more each caller will have this process open.

        Raises:
            BackendError: that cannot be done.

        """
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self._files = files
        self._callers: set[_Caller] = set()
        self._muted = threading.Event()
        try:
            with ExitStack() as undo:
                self._listener = undo.enter_context(socket.create_server((host, 0), backlog=128))
                self._selector = undo.enter_context(selectors.DefaultSelector())
                self._bell, self._closing = socket.socketpair()
                undo.pop_all()
        except OSError as error:
            message = f"cannot listen on {host}: {error}"
            raise BackendError(message) from error
        self._listener.settimeout(0)
        self.port = int(self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mooncake presence", daemon=True)
        self._thread.start()

    def mute(self) -> None:
        """Say no more that we are here; on return nobody hears it any more."""
        self._bell.send(_MUTE)
        self._muted.wait(_JOIN_S)

    def close(self) -> None:
        """Hang up on everyone: all links to us end."""
        self._bell.close()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        """Serve until the other end of ``_closing`` is closed."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._closing:
                    if not self._closing.recv(1):
                        self._hang_up()
                        return
                    self._muted.set()
                elif self._muted.is_set():
                    # Whoever calls or asks now waits until we hang up.
                    self._selector.unregister(key.fileobj)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data)

    def _hang_up(self) -> None:
        for caller in tuple(self._callers):
            self._drop(caller)
        self._selector.close()
        self._listener.close()
        self._closing.close()

    def _accept(self) -> None:
        # First of all: they may be what keeps the process from taking another one.
        now_s = time.monotonic()
        for caller in tuple(self._callers):
            if not caller.greeted() and now_s - caller.since_s > _GREETING_S:
                self._drop(caller)
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, mostly. It would be told again at once, for as long as it lasts.
            logger.warning("a peer's call cannot be taken: %s", error)
            time.sleep(_PAUSE_S)
            return
        if len(self._callers) >= _MAX_CALLERS:
            logger.warning("a peer's call is refused: there are %d already", len(self._callers))
            connection.close()
            return
        connection.settimeout(0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Else the connections of hosts that are gone would stay for ever.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        caller = _Caller(connection)
        self._callers.add(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _serve(self, caller: _Caller) -> None:
        """Take what a caller has said, and answer."""
        if caller not in self._callers:
            return
        try:
            said = caller.socket.recv(_CHUNK_BYTES)
            missing = INCARNATION_BYTES - len(caller.greeting)
            caller.greeting += said[:missing]
            answers = len(said) - missing + (missing > 0)
            greets = missing > 0 and caller.greeted()
            if not said or (caller.greeted() and caller.greeting != self.incarnation):
                self._drop(caller)
            elif greets and not self._has_room():
                logger.warning(
                    "a sender is refused: it needs %d open files more; see ulimit -n, ulimit -Hn", self._files
                )
                caller.socket.send(_NO_ROOM)
                self._drop(caller)
            elif answers > 0:
                # It raises when there is no room: a caller that never reads is dropped.
                caller.socket.send(_YES * answers)
        except OSError:
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._callers.discard(caller)
        with contextlib.suppress(KeyError):
            # Muted, it is not there any more.
            self._selector.unregister(caller.socket)
        caller.socket.close()

    def _has_room(self) -> bool:
        """Whether one more caller's files can be opened, and those of the callers before it."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            now = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - much faster; there may be thousands
        except OSError:
            # There is not even one left to look.
            return False
        greeted = sum(caller.greeted() for caller in self._callers)
        return max(now + self._files, (greeted + 1) * self._files) + _SPARE_FILES <= most
