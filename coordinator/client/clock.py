"""A clock by which silence is judged: time in which nobody could listen does not count.

A process that is stopped, or a host that stands still, would else take its own absence for that of others:
when it goes on, it would judge before it has read what lies in its sockets.
"""

from __future__ import annotations

import time
from typing import Final

#: Who wakes up this much later than it wanted has stood still, seconds.
STILL_S: Final = 1.0


class Clock:
    """Monotonic seconds, less those in which its thread stood still."""

    def __init__(self) -> None:
        """Begin as the system's monotonic clock."""
        self._still_s = 0.0
        self._turned_s = time.monotonic()
        self._sleep_s = 0.0

    def now_s(self) -> float:
        """Return the time; any thread may ask."""
        return time.monotonic() - self._still_s

    def turn(self) -> float:
        """Note that the thread listens and judges now; returns for how long it stood still before, or 0."""
        now_s = self.now_s()
        late_s = now_s - self._turned_s - self._sleep_s
        still_s = late_s if late_s > STILL_S else 0.0
        self._still_s += still_s
        self._turned_s = now_s - still_s
        self._sleep_s = 0.0
        return still_s

    def sleeps(self, sleep_s: float) -> None:
        """Note that the thread sleeps now, for as long or less."""
        self._sleep_s = sleep_s
