"""A coordinator and its clients in memory, for the logic of the engines alone: no process, no socket.

It moves pages at once and decides what a test tells it to. The engines' real clients are tested where
the demo runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coordinator.messages import Event, Outcome, Refused, Released
from coordinator.reasons import Failure, Reason

if TYPE_CHECKING:
    from coordinator.sim.pattern import Section

Pages = NDArray[np.int32]


def head(number: int) -> bytes:
    """Make a head token, as far as the stand-in understands one."""
    return number.to_bytes(8, "little")


@dataclass
class StandIn:
    """The client of one rank: remembers what is said, and drains what a test puts into ``events``."""

    events: list[Event] = field(default_factory=list)
    drained: int = 0
    refused: list[Refused] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    cancelled: list[tuple[int, str]] = field(default_factory=list)
    sent: dict[int, list[Pages]] = field(default_factory=dict)
    aux: dict[int, bytes] = field(default_factory=dict)
    offered: dict[int, tuple[Pages, int]] = field(default_factory=dict)

    def drain(self, through: bytes | None = None) -> list[Event]:
        number = len(self.events) if through is None else int.from_bytes(through, "little")
        events, self.drained = self.events[self.drained : number], max(self.drained, number)
        return events

    def refusals(self) -> list[Refused]:
        return self.refused

    def open(self, room: int) -> None:
        self.opened.append(room)

    def cancel(self, room: int, why: str = "") -> None:
        self.cancelled.append((room, why))

    def send(self, room: int, pages: Pages, *, last: bool, aux: bytes = b"") -> None:
        self.sent.setdefault(room, []).append(pages.copy())
        if last:
            self.aux[room] = aux

    def offer(self, room: int, pages: Pages, prefix_pages: int = 0) -> None:
        self.offered[room] = (pages.copy(), prefix_pages)


def move(room: int, source: StandIn, ours: list[Section], target: StandIn, theirs: list[Section]) -> None:
    """Copy a room's pages, behind the prefix, as a worker would."""
    pages, prefix = target.offered[room]
    sent = np.concatenate(source.sent[room])
    for (here, *_), (there, *_) in zip(ours, theirs, strict=True):
        there[:, pages] = here[:, sent[prefix:]]


def success(room: int, attempt: int = 1, aux: bytes = b"") -> list[Event]:
    """Make the events of a handoff that succeeded."""
    return [Outcome(room, attempt, None, aux), Released(room, attempt)]


def failure(room: int, attempt: int = 1) -> Outcome:
    """Make the outcome of a handoff whose peer was lost."""
    return Outcome(room, attempt, Failure(Reason.PEER_LOST, "decode-0/1", "its process has ended"))
