"""Rooms that wait: prefill is complete, and nothing else ever comes."""

from __future__ import annotations

import os
import time
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from coordinator.client import Outcome, PrefillRank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coordinator.client import DecodeRank
    from coordinator.messages import Event

#: Pages that each room names: a prompt of 1,024 tokens in pages of 16.
PAGES: Final = 64
#: Rooms that are said at once, before the coordinator must have them; the client's queue is bounded.
_BATCH: Final = 10_000
_BARRIER_S: Final = 60.0
#: Rooms from here on are for barriers.
_BARRIER_ROOM: Final = 1 << 62

_barriers = count()


def complete(rank: PrefillRank, rooms: Iterable[int]) -> None:
    """Say that prefill is complete for these rooms; return when the coordinator knows."""
    pages = np.arange(PAGES, dtype=np.int32)
    for said, room in enumerate(rooms, start=1):
        rank.send(room, pages, last=True)
        if said % _BATCH == 0:
            barrier(rank)
    barrier(rank)


def barrier(rank: PrefillRank | DecodeRank) -> list[Event]:
    """Wait until the coordinator has taken everything that this rank has said before.

    A room that is begun and given up at once is answered, behind everything else.

    Returns:
        events of other rooms that have come meanwhile.

    Raises:
        TimeoutError: no answer came.

    """
    # No other rank's process uses this room, and this one only once.
    room = _BARRIER_ROOM + (os.getpid() << 32) + next(_barriers)
    if isinstance(rank, PrefillRank):
        rank.open(room)
    else:
        rank.offer(room, [])
    rank.cancel(room, "a barrier")
    others: list[Event] = []
    deadline_s = time.monotonic() + _BARRIER_S
    while time.monotonic() < deadline_s:
        rank.wait(0.1)
        events = rank.drain()
        others += [event for event in events if event.room < _BARRIER_ROOM]
        if any(isinstance(event, Outcome) and event.room == room for event in events):
            return others
    message = f"the coordinator has not answered within {_BARRIER_S:g} s"
    raise TimeoutError(message)
