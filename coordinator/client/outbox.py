"""What a rank has said and the coordinator has not confirmed: numbered, kept, sent again.

Sans-IO: no socket, no clock, no lock; whoever shares an outbox between threads guards it.

Theory of operation
    ``put`` gives items their place; ``take`` numbers the next ones and hands them out to be
    submitted; ``confirm`` forgets what has arrived; ``rewind`` makes what is not confirmed due
    again. Whatever is lost on the way, the coordinator gets every item once and in order.

    Items are numbered 1, 2, 3 ... A coordinator that starts anew is told in ``Hello`` up to where
    its predecessor confirmed them; ``rebase`` says from where it counts.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from coordinator.messages import Item


class Entry(NamedTuple):
    """One item, and how many bytes it counts for."""

    item: Item
    size_bytes: int


class Outbox:
    """The items of one client that are not confirmed yet.

    Attributes:
        size_bytes: how many bytes they have.
        confirmed: the coordinator has every item up to this number.

    """

    __slots__ = ("_handed_out", "_sent", "_unsent", "confirmed", "size_bytes")

    def __init__(self) -> None:
        self._sent: deque[Entry] = deque()
        self._unsent: deque[Entry] = deque()
        # Number of the last item that ever was: more than ``sent`` after a rewind.
        self._handed_out = 0
        self.size_bytes = 0
        self.confirmed = 0

    def __len__(self) -> int:
        return len(self._sent) + len(self._unsent)

    @property
    def unsent(self) -> int:
        """How many items are due to be submitted."""
        return len(self._unsent)

    @property
    def due(self) -> Item | None:
        """The item that is to be submitted next."""
        return self._unsent[0].item if self._unsent else None

    @property
    def sent(self) -> int:
        """Number of the last item that was handed out and is not due again."""
        return self.confirmed + len(self._sent)

    def put(self, item: Item, size_bytes: int) -> None:
        """Add an item behind all others."""
        self._unsent.append(Entry(item, size_bytes))
        self.size_bytes += size_bytes

    def take(self, max_items: int, max_bytes: int) -> list[Item]:
        """Hand out the next items, the first of which has the number ``sent + 1`` before the call.

        At least one when there is any; more only while they have no more than ``max_bytes``.
        """
        taken: list[Item] = []
        size_bytes = 0
        while self._unsent and len(taken) < max_items:
            size_bytes += self._unsent[0].size_bytes
            if taken and size_bytes > max_bytes:
                break
            entry = self._unsent.popleft()
            self._sent.append(entry)
            taken.append(entry.item)
        self._handed_out = max(self._handed_out, self.sent)
        return taken

    def confirm(self, received: int) -> list[Item]:
        """Forget the items up to ``received``; returns those that it had not been told before.

        A number that is behind is old news. One that is ahead of what was handed out is none of
        ours, and changes nothing.
        """
        confirmed: list[Item] = []
        while self.confirmed < received <= self._handed_out:
            entry = (self._sent or self._unsent).popleft()
            self.size_bytes -= entry.size_bytes
            self.confirmed += 1
            confirmed.append(entry.item)
        return confirmed

    def rewind(self) -> None:
        """Make everything that is not confirmed due again, in order."""
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()

    def rebase(self, received: int) -> None:
        """Submit to a new coordinator, to whom our next item has the number ``received + 1``."""
        self.rewind()
        self.confirmed = self._handed_out = received
