"""Reports on their way from the lanes' threads to the one that owns the socket."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.messages import Report


class Outbox:
    """Reports in order, and a file descriptor that is readable while there may be some.

    It needs no bound of its own: a lane has a bounded number of moves, and each gives rise to a few
    reports. ``put`` is for any thread, everything else for the one that owns the socket.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._reports: deque[Report] = deque()
        # So that a late report never goes to a descriptor that is something else by now.
        self._lock = threading.Lock()
        self._awake = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, report: Report) -> None:
        """Add a report."""
        self._reports.append(report)
        # One wake-up is enough for all reports until the owner has looked.
        if not self._awake:
            self._ring()

    def fileno(self) -> int:
        """Return the descriptor to wait on; -1 once it is closed."""
        return self._wake

    def rest(self) -> None:
        """Make the descriptor unreadable until the next ``put``. Call it before ``take``, not after."""
        with self._lock:
            os.eventfd_read(self._wake)
            self._awake = False

    def take(self, most: int) -> list[Report]:
        """Remove and return up to ``most`` reports."""
        reports = self._reports
        return [reports.popleft() for _ in range(min(most, len(reports)))]

    def __bool__(self) -> bool:
        """Whether there are reports."""
        return bool(self._reports)

    def close(self) -> None:
        """Close the descriptor. Calling it twice is fine; what is put later stays here."""
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _ring(self) -> None:
        """Make the descriptor readable, if it is ours still."""
        with self._lock:
            if not self._awake and self._wake >= 0:
                self._awake = True
                os.eventfd_write(self._wake, 1)
