"""How the last attempt of each room has ended: for attempt numbers, and for sides that never heard."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from itertools import islice
from typing import Final

import msgspec

from coordinator.messages import Elsewhere, Role
from coordinator.reasons import Failure

#: How many ended rooms are remembered.
REMEMBERED: Final = 16384


class Ended(msgspec.Struct):
    """The last attempt of a room, and how it ended.

    ``unaware`` is the side that was not known when it failed, and has not heard of it, if any;
    ``elsewhere`` is where the other one has. One that is ``inherited`` is known from a former coordinator's
    ranks, and may have been told to that side all the same. ``aux`` are the side data of a success, None
    when nobody remembers them. ``at_s`` is when it was learnt, on the loop's clock.
    """

    attempt: int
    failure: Failure | None
    unaware: Role | None = None
    elsewhere: Elsewhere | None = None
    inherited: bool = False
    aux: bytes | None = None
    at_s: float = msgspec.field(default_factory=lambda: asyncio.get_running_loop().time())


class Endings:
    """The rooms that ended last."""

    def __init__(self) -> None:
        """Remember none."""
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        # Rooms with attempts whose pages are held, and how many: the next one needs a number of its own.
        self._held: Counter[int] = Counter()

    def get(self, room: int) -> Ended | None:
        """How the last attempt of a room ended, as far as it is remembered."""
        return self._ended.get(room)

    def next_attempt(self, room: int) -> int:
        """Return the number of a room's next attempt."""
        ended = self._ended.get(room)
        return ended.attempt + 1 if ended is not None else 1

    def remember(self, room: int, ended: Ended) -> None:
        """Remember how a room ended, and forget the room that ended longest ago, unless it is held."""
        self._ended[room] = ended
        self._ended.move_to_end(room)
        # Two at a time, so that it is no more for long when one of them must stay.
        for oldest in list(islice(self._ended, min(2, max(0, len(self._ended) - REMEMBERED)))):
            if oldest in self._held:
                self._ended.move_to_end(oldest)
            else:
                del self._ended[oldest]

    def hold(self, room: int) -> None:
        """Do not forget a room: pages of an attempt are held."""
        self._held[room] += 1

    def let_go(self, room: int) -> None:
        """Pages of an attempt that were held are not any more."""
        self._held[room] -= 1
        if not self._held[room]:
            del self._held[room]
