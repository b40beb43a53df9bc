"""Things that must give a sign within a bound: ranks, moving legs, offers, connects.

One bound for all members makes the oldest sign the next to expire. A dict keeps insertion order, so
a sign is a pop and an insert, and one timer per watch, at the oldest member, serves any number of
them: exact, and no cost while nothing expires.

A timer that comes late tells that this process stood still: it was stopped, or its host was. That is
nobody's silence. The signs of that time lie in the sockets; everybody gets a moment for them to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

#: A timer that is later than this was kept from running, and for so long signs may come in then, seconds.
STILL_S: Final = 1.0

K = TypeVar("K", bound=Hashable)


class Watch(Generic[K]):
    """Calls ``expired(key)`` once for a member that gave no sign for ``bound_s``, and drops it."""

    def __init__(self, bound_s: float, expired: Callable[[K], None]) -> None:
        """Start empty. ``bound_s`` may be changed at any time with ``rebound``."""
        self._bound_s = bound_s
        self._expired = expired
        self._seen: dict[K, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def __len__(self) -> int:
        """How many members are watched."""
        return len(self._seen)

    def __contains__(self, key: K) -> bool:
        """Whether ``key`` is watched."""
        return key in self._seen

    @property
    def bound_s(self) -> float:
        """How long a member may be silent."""
        return self._bound_s

    def rebound(self, bound_s: float) -> None:
        """Change the bound, also for members that are watched already."""
        self._bound_s = bound_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._arm()

    def sign(self, key: K) -> None:
        """Note a sign of ``key`` now; an unknown key becomes a member."""
        self._seen.pop(key, None)
        self._seen[key] = asyncio.get_running_loop().time()
        if self._timer is None:
            self._arm()

    def discard(self, key: K) -> None:
        """Watch ``key`` no longer."""
        self._seen.pop(key, None)

    def close(self) -> None:
        """Forget all members; nothing expires any more."""
        self._seen.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        for oldest in self._seen.values():
            loop, due_s = asyncio.get_running_loop(), oldest + self._bound_s
            self._timer = loop.call_at(due_s, self._expire)
            # A new bound may be over already.
            self._due_s = max(due_s, loop.time())
            return

    def _expire(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        if now_s - self._due_s > STILL_S:
            moved_s = now_s - self._due_s + STILL_S
            self._seen = {key: min(seen + moved_s, now_s) for key, seen in self._seen.items()}
            self._arm()
            return
        overdue = []
        for key, seen in self._seen.items():
            # The very sum that the timer was armed with: any other form may round to "not yet" for ever.
            if seen + self._bound_s > now_s:
                break
            overdue.append(key)
        for key in overdue:
            self.discard(key)
        self._arm()
        for key in overdue:
            self._expired(key)
