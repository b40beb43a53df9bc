"""Reports on their way from the lanes' threads to the one that owns the socket."""

from __future__ import annotations

import os
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
        self._awake = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, report: Report) -> None:
        """Add a report."""
        self._reports.append(report)
        # One wake-up is enough for all reports until the owner has looked.
        if not self._awake:
            self._awake = True
            os.eventfd_write(self._wake, 1)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._wake

    def rest(self) -> None:
        """Make the descriptor unreadable until the next ``put``. Call it before ``take``, not after."""
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
        """Close the descriptor; nothing puts any more."""
        os.close(self._wake)
