"""The sequenced log of each group, and its broadcast.

Every group has its own log: events numbered 1, 2, 3 ... within the epoch. What a group's ranks must
hear is appended; all that one turn of the loop appended goes out as one message. A heartbeat carries
the head, so that the loss of the last message is noticed too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from coordinator.messages import Broadcast, Event, Outcome, encode

if TYPE_CHECKING:
    from coordinator.channel import Channel
    from coordinator.groups import Group

#: How often a group hears the head at least.
HEARTBEAT_S: Final = 0.5
#: Bounds of one message; a longer backlog goes out as several. With so much side data a message is full: a
#: rank cuts the line at 64 MiB.
MAX_EVENTS: Final = 1024
FULL_BYTES: Final = 4 << 20


def fitting(events: list[Event]) -> list[Event]:
    """Return the first of these events, as many as go into one message."""
    size_bytes = 0
    for count, event in enumerate(events[:MAX_EVENTS], 1):
        if isinstance(event, Outcome) and event.aux:
            size_bytes += len(event.aux)
            if size_bytes >= FULL_BYTES:
                return events[:count]
    return events[:MAX_EVENTS]


class GroupLog:
    """The events of one group that some rank may still need."""

    def __init__(self) -> None:
        """Start empty, at number 0."""
        self._events: deque[Event] = deque()
        self.head: int = 0

    def __len__(self) -> int:
        """How many events are kept."""
        return len(self._events)

    @property
    def first(self) -> int:
        """Number of the oldest event kept; ``head + 1`` when none is."""
        return self.head - len(self._events) + 1

    def append(self, event: Event) -> int:
        """Add an event; returns its number."""
        self._events.append(event)
        self.head += 1
        return self.head

    def since(self, number: int, most: int | None = None) -> list[Event]:
        """The events after ``number``, as far as they are kept, and no more than ``most`` of them."""
        skipped = max(number - self.first + 1, 0)
        count = len(self._events) - skipped
        if count < skipped:
            # From the tail: what is asked for is nearly always the newest few.
            newest = list(islice(reversed(self._events), max(count, 0)))
            newest.reverse()
            return newest[:most]
        return list(islice(self._events, skipped, None if most is None else skipped + most))

    def restore(self, head: int, events: list[Event]) -> None:
        """Go on where another coordinator ended: at ``head``, of which ``events`` are the last."""
        self.head = head
        self._events = deque(events)

    def trim(self, through: int) -> None:
        """Drop the events up to and including ``through``."""
        for _ in range(min(through - self.first + 1, len(self._events))):
            self._events.popleft()


class Broadcaster:
    """Publishes the groups' logs; owns the outcome socket."""

    def __init__(self, epoch: int, channel: Channel) -> None:
        """Publish on ``channel`` (an XPUB) as ``epoch``."""
        self._epoch = epoch
        self._channel = channel
        self._due: dict[Group, None] = {}
        self._flush_scheduled = False

    def publish(self, group: Group) -> None:
        """Let the group hear what it has not been told, in this turn of the loop."""
        self._due[group] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what is due now."""
        self._flush_scheduled = False
        due, self._due = self._due, {}
        for group in due:
            # A new engine may listen under the old one's name, whose numbers are not its own.
            if not group.deserted:
                self._send(group)

    async def beat(self, groups: dict[str, Group]) -> None:
        """Send a heartbeat to every group that heard nothing, for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            now_s = asyncio.get_running_loop().time()
            for group in groups.values():
                # A period of slack: woken a little early, the next chance would be too late.
                if now_s - group.published_at_s > HEARTBEAT_S * 0.75:
                    self.publish(group)

    def _send(self, group: Group) -> None:
        events = group.log.since(group.published)
        group.published_at_s = asyncio.get_running_loop().time()
        while True:
            part = fitting(events)
            events = events[len(part) :]
            message = Broadcast(
                self._epoch, group.published + 1, group.stable, group.received(), group.absent, part
            )
            group.published += len(part)
            # What a rank does not take in time is dropped by the socket, untold: the rank sees the gap.
            self._channel.send([group.topic, encode(message)])
            if not events:
                return
