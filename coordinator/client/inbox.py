"""The events of a rank's group: in order, none twice, none missing, until the engine drains them.

Sans-IO: no socket, no clock, no lock; whoever shares an inbox between threads guards it.

Theory of operation
    Events arrive with their numbers, in broadcasts and in the coordinator's ``Welcome``. What is
    had already is skipped. What does not join on is not taken (``take`` tells that there is a
    gap): a ``Welcome`` brings everything after ``have``. So arrivals may be lost, doubled and
    shuffled, and every rank still drains the same events in the same order.

    A coordinator that starts anew, in a new epoch, learns from its ranks how far the group had
    come and counts on from there. So numbers go on over all epochs; a rank that was never in any
    begins where its first ``Welcome`` says.

    ``token`` is for lockstep: it names the last event that every live rank of the group has. It
    moves on to a new epoch when all ranks have heard of that epoch, never before: a rank that is
    asked to drain through a token must know what it means.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from coordinator.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.messages import Event

#: How many epochs are told apart from unknown ones; each is one restart of a coordinator.
_MAX_EPOCHS: Final = 256
#: The epoch of a rank that no coordinator has welcomed.
NO_EPOCH: Final = 0
_TOKEN: Final = struct.Struct("<QQB")


class Head(NamedTuple):
    """A head token, read: every event up to ``number``, the last of which is of ``epoch``."""

    epoch: int
    number: int

    def pack(self) -> bytes:
        """Return the token: 17 bytes, of which the last, flags, is 0."""
        return _TOKEN.pack(self.epoch, self.number, 0)

    @classmethod
    def unpack(cls, token: bytes) -> Head:
        """Read a token.

        Raises:
            ProtocolError: it is none, or says what this version does not know.

        """
        if len(token) != _TOKEN.size:
            message = f"a head token has {_TOKEN.size} bytes, this has {len(token)}"
            raise ProtocolError(message)
        epoch, number, flags = _TOKEN.unpack(token)
        if flags:
            message = f"the head token has the flags {flags:#x}, which this version does not know"
            raise ProtocolError(message)
        return cls(epoch, number)


class Inbox:
    """The sequence of one group, as one rank has it.

    Attributes:
        epoch: the coordinator's incarnation; ``NO_EPOCH`` before the first ``enter``.
        have: every event up to this number has arrived.
        base: events up to this number are not for this rank, which joined later.
        drained: the engine has drained every event up to this number.
        token: up to where every live rank of the group has the events, for ``drain_through``.

    """

    __slots__ = (
        "_bound",
        "_group_ready",
        "_head",
        "_past",
        "_queue",
        "_stable",
        "base",
        "drained",
        "epoch",
        "have",
        "token",
    )

    def __init__(self, bound: int) -> None:
        """Hold at most ``bound`` events that nobody has drained."""
        self._bound = bound
        # What has arrived and is not drained: the events from drained + 1 to have.
        self._queue: deque[Event] = deque()
        # In the order of their coming, so that the oldest can be forgotten.
        self._past: dict[int, None] = {}
        self._stable = 0
        self._group_ready = False
        self._head = Head(NO_EPOCH, 0)
        self.epoch = NO_EPOCH
        self.base = 0
        self.have = 0
        self.drained = 0
        self.token = self._head.pack()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether no more is taken until the engine drains."""
        return len(self._queue) >= self._bound

    def is_past(self, epoch: int) -> bool:
        """Whether this rank has left ``epoch`` for a later one."""
        return epoch in self._past

    def enter(self, epoch: int, first: int) -> None:
        """Go on to a new epoch. ``first``: the number at which a rank that was in none begins."""
        if self.epoch == NO_EPOCH:
            self.skip(first)
        self._past[self.epoch] = None
        if len(self._past) > _MAX_EPOCHS:
            del self._past[next(iter(self._past))]
        self.epoch = epoch
        self._stable = 0
        self._group_ready = False

    def skip(self, first: int) -> None:
        """Begin at number ``first``; for a rank that has had nothing yet."""
        self.base = self.have = self.drained = first - 1

    def take(self, first: int, events: Sequence[Event], stable: int) -> Sequence[Event]:
        """Take events of this epoch, of which the first has the number ``first``.

        Args:
            first: number of ``events[0]``; the next one to come when there are none.
            events: in order.
            stable: up to where every live rank has the events.

        Returns:
            those that were new.

        """
        self._stable = max(self._stable, stable)
        new: Sequence[Event] = ()
        if first <= self.have + 1:
            new = events[self.have + 1 - first :] if first <= self.have else events
            space = self._bound - len(self._queue)
            new = new if len(new) <= space else new[:space]
            self._queue.extend(new)
            self.have += len(new)
        self._move_head()
        return new

    def group_ready(self) -> None:
        """All ranks of the group have heard of this epoch."""
        self._group_ready = True
        self._move_head()

    def reaches(self, head: Head) -> bool:
        """Whether this rank knows the epoch of ``head`` and has everything up to it."""
        return self.have >= head.number and (head.epoch == self.epoch or head.epoch in self._past)

    def drain(self) -> list[Event]:
        """Hand over everything that has arrived."""
        events = list(self._queue)
        self._queue.clear()
        self.drained = self.have
        return events

    def drain_through(self, head: Head) -> list[Event]:
        """Hand over exactly the events up to ``head``, which this rank ``reaches``."""
        events = [self._queue.popleft() for _ in range(head.number - self.drained)]
        self.drained += len(events)
        return events

    def _move_head(self) -> None:
        if self._group_ready and self._head != (self.epoch, number := min(self._stable, self.have)):
            self._head = Head(self.epoch, number)
            self.token = self._head.pack()
