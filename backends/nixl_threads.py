"""A nixl link whose large writes are posted by threads of its own, each with an agent of its own.

Theory of operation
    On one host UCX copies host memory within the call that posts a write (CMA). Posted by its owner, writes
    to such a peer would move as fast as one core copies, and the owner could do nothing meanwhile: not
    plan the next write, not hear that this one shall be fenced. So ``write`` queues them and returns, and
    the threads take them in order. A small write is copied before a thread would be awake: the owner posts
    it itself, where an agent is free.

Who may touch what
    A thread only posts, and leaves what came of it in ``QueuedTransfer.outcome``; all else of a
    ``QueuedTransfer`` changes when its owner polls. The agents' own transfers do not get that far: a thread
    that finds the peer gone ends all of its agent's. Whoever posts takes the agent out of ``_free``; to ask
    after a transfer that moves by itself, its owner waits for the agent's lock.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from backends.base import (
    BackendError,
    Link,
    PeerDisconnectedError,
    Status,
    Transfer,
    TransferError,
    fence_all,
)
from backends.nixl_link import FENCE_WAIT_S, MAX_OUTSTANDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Part
    from backends.nixl_link import NixlLink

#: How long the end of the process waits for a thread to come back from native code.
EXIT_WAIT_S: Final = 1.0
#: Writes below this are small: copying them takes some 1 ms, waking a thread and asking after it 0.3 ms.
SMALL_BYTES: Final = 4 << 20


class QueuedTransfer(Transfer):
    """A write that waits for a thread, or was posted by one.

    Attributes:
        parts: what is to be written.
        outcome: what came of posting it; None before.

    """

    __slots__ = ("outcome", "parts")

    def __init__(self, parts: Sequence[Part], outcome: Transfer | None = None) -> None:
        """It waits, or was posted already."""
        super().__init__()
        self.parts = parts
        self.outcome: Transfer | Exception | None = outcome

    def poll(self) -> Status:
        """See ``Transfer.poll``.

        Raises:
            Exception: the thread met one that no backend may raise; it belongs to whoever owns the link.

        """
        outcome = self.outcome
        if outcome is None or self.settled:
            return self.status
        if isinstance(outcome, Transfer):
            outcome.poll()
            # In this order: another thread may end it now, and tells that it is settled last of all.
            self.settled = outcome.settled
            self.status, self.error, self.progress = outcome.status, outcome.error, outcome.progress
        elif isinstance(outcome, BackendError):
            # Nothing of it was posted.
            self._fail(outcome)
        else:
            raise outcome
        return self.status

    def end(self, error: BackendError) -> None:
        """Be settled, for nothing of the link moves any more; without a better reason by ``error``."""
        if isinstance(self.outcome, Transfer):
            self.poll()
        else:
            self._fail(self.outcome if isinstance(self.outcome, BackendError) else error)

    def _fail(self, error: BackendError) -> None:
        self.error, self.status, self.settled = error, Status.FAILED, True


class ThreadedLink(Link):
    """Several links to one peer as one, with as many threads.

    Attributes:
        fenced: whether nothing can be written any more, nothing moves, and the threads have ended.

    """

    def __init__(self, peer: str, links: Sequence[NixlLink]) -> None:
        """Start the threads; the links, all to ``peer``, belong to this one from now on.

        Raises:
            BackendError: the host has no more threads. The links are still the caller's.

        """
        self.peer = peer
        self._links = list(links)
        self._free = list(links)
        self._queue: deque[QueuedTransfer] = deque()
        self._unsettled: list[QueuedTransfer] = []
        self._closed = False
        self._changed = threading.Condition()
        self.fenced = False
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(len(links)):
                thread = threading.Thread(target=self._run, name=f"write {number} to {peer}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self._end(FENCE_WAIT_S)
            message = f"no thread that writes to {peer} can be started: {error}"
            raise BackendError(message) from error
        # A thread that comes back from native code into an interpreter that has ended aborts the process.
        atexit.register(self._end, EXIT_WAIT_S)

    def write(self, parts: Sequence[Part]) -> Transfer:
        """See ``Link.write``."""
        size_bytes = self._links[0].check(parts)
        self._unsettled = [transfer for transfer in self._unsettled if not transfer.settled]
        if len(self._unsettled) >= MAX_OUTSTANDING:
            message = f"{len(self._unsettled)} transfers to {self.peer} are outstanding already"
            raise TransferError(message)
        with self._changed:
            if self._closed or any(link.fenced for link in self._links):
                message = f"the link to {self.peer} was fenced or its peer is gone; connect anew"
                raise PeerDisconnectedError(message)
            link = self._free.pop() if size_bytes < SMALL_BYTES and self._free else None
            if link is None:
                transfer = QueuedTransfer(parts)
                self._queue.append(transfer)
                self._unsettled.append(transfer)
                self._changed.notify()
                return transfer
        try:
            transfer = QueuedTransfer((), link.post(parts))
        finally:
            self._give_back(link)
        self._unsettled.append(transfer)
        return transfer

    def fence(self) -> None:
        """See ``Link.fence``."""
        if os.getpid() != self._process:
            message = f"the link to {self.peer} belongs to the process that this one was forked from"
            raise BackendError(message)
        if not self._end(FENCE_WAIT_S):
            message = f"the link to {self.peer} is in a native call that does not return"
            raise BackendError(message)
        fence_all(self._links)
        self.fenced = True
        atexit.unregister(self._end)
        for transfer in self._unsettled:
            if not transfer.settled:
                transfer.end(self._fenced_error())

    def _end(self, wait_s: float) -> bool:
        """Drop what is queued and wait for the threads to end; whether they did in time."""
        if os.getpid() != self._process:
            return True  # In a forked child there are none, and who holds the lock there never gives it back.
        with self._changed:
            self._closed = True
            while self._queue:
                self._queue.popleft().outcome = self._fenced_error()
            self._changed.notify_all()
        until_s = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _fenced_error(self) -> PeerDisconnectedError:
        return PeerDisconnectedError(f"the link to {self.peer} was fenced")

    def _run(self) -> None:
        """Post writes, until the link is fenced."""
        while (task := self._take()) is not None:
            transfer, link = task
            try:
                transfer.outcome = link.post(transfer.parts)
            except Exception as error:  # noqa: BLE001 - a thread must not die unseen; ``poll`` raises it
                transfer.outcome = error
            # The last one is kept here until there is another.
            transfer.parts = ()
            self._give_back(link)

    def _take(self) -> tuple[QueuedTransfer, NixlLink] | None:
        """Wait for a write and a free agent; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._queue and self._free))
            return None if self._closed else (self._queue.popleft(), self._free.pop())

    def _give_back(self, link: NixlLink) -> None:
        with self._changed:
            self._free.append(link)
            if self._queue:
                # Not for nothing: who is awake needs the interpreter, and takes it from the owner.
                self._changed.notify()
