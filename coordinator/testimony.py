"""What the ranks of one group remember of a former coordinator, put together.

They have heard the same events under the same numbers, each up to another one, and each remembers
only its last ones. Two that have heard different events under one number cannot agree any more: one
of them was left behind when the group went on without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coordinator.messages import Event, Hello, Outcome, SideData


class Testimony:
    """The memories of a group.

    Attributes:
        hellos: whose memories these are; the one that has heard most comes first.
        most: the hello of the rank that has heard most.
        events: all events that are remembered, by number.
        awaits: the rooms of which a rank has spoken without having been told a verdict since -> the
            last attempt that any of the ranks knows to have ended.
        contrary: the hellos that contradict that rank's.
        least: up to where all others have everything.

    """

    def __init__(self, hellos: Iterable[Hello]) -> None:
        """Put together the memories of ``hellos``, of which there is one at least."""
        self.hellos = sorted(hellos, key=lambda hello: hello.acknowledged, reverse=True)
        self.most = self.hellos[0]
        self.events: dict[int, Event] = {}
        self._side_data: dict[tuple[int, int], SideData] = {}
        self.awaits: dict[int, int] = {}
        self.contrary: list[Hello] = []
        self.least = self.most.acknowledged
        for hello in self.hellos:
            if self.events and not agrees(hello, self.events):
                self.contrary.append(hello)
            else:
                self.events.update(_numbered(hello))
                self._note_side_data(hello)
                self._note_rooms(hello)
                self.least = hello.acknowledged

    def _note_side_data(self, hello: Hello) -> None:
        if hello.memory is not None and hello.rank == 0:
            self._side_data.update({(sent.room, sent.attempt): sent for sent in hello.memory.sent})

    def _note_rooms(self, hello: Hello) -> None:
        if hello.memory is not None:
            for room in (*hello.memory.held, *hello.memory.said):
                self.awaits[room.room] = max(room.attempt, self.awaits.get(room.room, 0))

    @property
    def begun(self) -> set[int]:
        """The rooms that the former coordinator may have begun, without a verdict that all have heard."""
        memories = [hello.memory for hello in self.hellos]
        return {held.room for memory in memories if memory for held in memory.held}

    @property
    def lineage(self) -> int:
        """That of the group."""
        return self.most.memory.lineage if self.most.memory is not None else 0

    def side_data(self, number: int, outcome: Outcome) -> bytes | None:
        """What prefill's rank 0 has sent along with a success, the event ``number``; None: not known."""
        sent = self._side_data.get((outcome.room, outcome.attempt))
        if sent is None:
            # Perhaps others have heard the verdict and rank 0 has not: to it the room is in flight.
            sent = self._side_data.get((outcome.room, 0))
            if sent is not None and sent.after >= number:
                return None
        return None if sent is None else sent.aux

    @property
    def held(self) -> int:
        """How many rooms are in flight as far as some rank knows."""
        return len(self.begun)

    @property
    def kept(self) -> list[Event]:
        """The last events in order, as far back as they are remembered without a gap."""
        number, kept = self.most.acknowledged, []
        while number in self.events:
            kept.append(self.events[number])
            number -= 1
        return kept[::-1]


def agrees(hello: Hello, events: dict[int, Event]) -> bool:
    """Whether a rank has heard what ``events`` say, as far as both are remembered, and nothing after them."""
    if hello.acknowledged > max(events, default=0):
        return False
    return all(events.get(number, event) == event for number, event in _numbered(hello).items())


def _numbered(hello: Hello) -> dict[int, Event]:
    events = hello.memory.events if hello.memory is not None else []
    return dict(enumerate(events, hello.acknowledged - len(events) + 1))
