"""What an engine waits for, as the engine itself knows it: from what it said and what it drained.

Sans-IO: no socket, no clock, no lock; whoever shares a ledger between threads guards it.

Theory of operation
    All ranks of an engine say the same and drain the same in each step, so their ledgers are alike,
    whatever has reached which rank from the network meanwhile. So when a coordinator is lost, every
    rank gives up the same rooms, with the same attempts, in the same order.

    A room is in flight from the engine's first word until it drains the outcome; its pages are held
    until it drains the release.

    A coordinator that starts anew counts a room's attempts from 1 again, while the engine may still
    wait for the release of an attempt that it knows by that number. So after a loss the ledger adds
    the highest attempt that the engine has met so far to those of the coordinators to come.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from coordinator.messages import Offer, Open, Outcome, Released, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.messages import Event, Item
    from coordinator.reasons import Failure

#: How many ended rooms are remembered, for their attempts and for what is said of them too late.
_MAX_ENDED: Final = 16384


class Ledger:
    """The accounts of one rank.

    Attributes:
        given_up: the rooms that were in flight when a coordinator was lost last.

    """

    __slots__ = ("_added", "_ended", "_former", "_highest", "_in_flight", "_unreleased", "given_up")

    def __init__(self) -> None:
        """Start empty."""
        self._in_flight: set[int] = set()
        # Room -> the number of its last verdict (0: by a former coordinator), and the attempt.
        self._ended: dict[int, tuple[int, int]] = {}
        self._unreleased: set[tuple[int, int]] = set()
        # Not released when their coordinator was lost.
        self._former: set[tuple[int, int]] = set()
        self._highest = 0
        self._added = 0
        self.given_up: frozenset[int] = frozenset()

    @property
    def former(self) -> int:
        """How many attempts with a lost coordinator are not released."""
        return len(self._former)

    def spoke(self, item: Item) -> None:
        """The engine has said ``item``."""
        if not isinstance(item, Send | Offer | Open):
            return  # Nothing is begun by it.
        # One that was made before another thread drained the verdict is late.
        if item.room not in self._ended or self._ended[item.room][0] <= item.after:
            self._in_flight.add(item.room)

    def hand_over(self, first: int, events: list[Event]) -> list[Event]:
        """The engine drains these events, of which the first has the number ``first``.

        Returns:
            them, with the attempts as the engine counts them.

        """
        if self._added:
            events = [msgspec.structs.replace(event, attempt=event.attempt + self._added) for event in events]
        for number, event in enumerate(events, first):
            room, attempt = event.room, event.attempt
            if isinstance(event, Outcome):
                self._in_flight.discard(room)
                self._unreleased.add((room, attempt))
                self._end(room, number, attempt)
            else:
                self._unreleased.discard((room, attempt))
        self._forget()
        return events

    def give_up(self, failure: Failure) -> list[Outcome]:
        """The coordinator is lost: fail what is in flight. What is said from now on is for another one."""
        rooms = sorted(self._in_flight)
        outcomes = [Outcome(room, self._next_attempt(room), failure) for room in rooms]
        self._former |= self._unreleased
        for outcome in outcomes:
            self._former.add((outcome.room, outcome.attempt))
            self._end(outcome.room, 0, outcome.attempt)
        self._ended = {room: (0, attempt) for room, (_, attempt) in self._ended.items()}
        self._forget()
        self._unreleased.clear()
        self._in_flight.clear()
        self.given_up = frozenset(rooms)
        self._added = self._highest
        return outcomes

    def release(self) -> Sequence[Released]:
        """All that former coordinators did not release is quiet now."""
        released = [Released(room, attempt) for room, attempt in sorted(self._former)]
        self._former.clear()
        return released

    def _next_attempt(self, room: int) -> int:
        known = self._ended[room][1] if room in self._ended else 0
        attempt = max(known, self._added) + 1
        while (room, attempt) in self._unreleased or (room, attempt) in self._former:
            attempt += 1
        return attempt

    def _end(self, room: int, number: int, attempt: int) -> None:
        self._highest = max(self._highest, attempt)
        # So that the room stands last.
        self._ended.pop(room, None)
        self._ended[room] = (number, attempt)

    def _forget(self) -> None:
        """Forget the rooms that ended longest ago."""
        for room in list(islice(self._ended, max(0, len(self._ended) - _MAX_ENDED))):
            del self._ended[room]
