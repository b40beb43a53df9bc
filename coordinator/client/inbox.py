"""The events of a rank's group: in order, none twice, none missing, until the engine drains them.

Sans-IO: no socket, no clock, no lock; whoever shares an inbox between threads guards it.

Theory of operation
    Events arrive with their numbers, in broadcasts and in the coordinator's ``Welcome``. What is
    had already is skipped. What does not join on is not taken (``take`` tells that there is a
    gap): a ``Welcome`` brings everything after ``have``. So arrivals may be lost, doubled and
    shuffled, and every rank still drains the same events in the same order.

    A coordinator that starts anew counts from 1 in a new epoch. Events of the epoch before that
    have arrived stay in the queue, in front.

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
_NO_EPOCH: Final = 0
_TOKEN: Final = struct.Struct("<QQB")


class Head(NamedTuple):
    """A head token, read: every event up to ``number`` of ``epoch``, and of all epochs before."""

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


class Position(NamedTuple):
    """A place in the sequence over all epochs; ``turn`` counts these in the order they came."""

    turn: int
    number: int


class _Epoch(NamedTuple):
    """An epoch that this rank has been in: its turn, and the last event that it had of it."""

    turn: int
    have: int


class Inbox:
    """The sequence of one group, as one rank has it.

    Attributes:
        epoch: the coordinator's incarnation; 0 before the first ``enter``.
        turn: how many epochs there were.
        have: every event of this epoch up to this number has arrived.
        base: events of this epoch up to this number are not for this rank, which joined later.
        drained: the engine has drained everything up to here.
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
        "turn",
    )

    def __init__(self, bound: int) -> None:
        """Hold at most ``bound`` events that nobody has drained."""
        self._bound = bound
        self._queue: deque[tuple[Position, Event]] = deque()
        self._past: dict[int, _Epoch] = {}
        self._stable = 0
        self._group_ready = False
        self.epoch = _NO_EPOCH
        self.turn = 0
        self.base = 0
        self.have = 0
        self.drained = Position(0, 0)
        self._head = Head(_NO_EPOCH, 0)
        self.token = self._head.pack()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether no more is taken until the engine drains."""
        return len(self._queue) >= self._bound

    @property
    def applied(self) -> int:
        """The engine has drained every event of this epoch up to this number."""
        return self.drained.number if self.drained.turn == self.turn else self.base

    def is_past(self, epoch: int) -> bool:
        """Whether this rank has left ``epoch`` for a later one."""
        return epoch in self._past

    def enter(self, epoch: int, first: int) -> None:
        """Go on to a new epoch, whose events concern this rank from number ``first`` on."""
        self._past[self.epoch] = _Epoch(self.turn, self.have)
        if len(self._past) > _MAX_EPOCHS:
            del self._past[next(iter(self._past))]
        self.epoch = epoch
        self.turn += 1
        self.base = self.have = first - 1
        self._stable = 0
        self._group_ready = False

    def take(self, first: int, events: Sequence[Event], stable: int) -> bool:
        """Take events of this epoch, of which the first has the number ``first``.

        Args:
            first: number of ``events[0]``; the next one to come when there are none.
            events: in order.
            stable: up to where every live rank has the events.

        Returns:
            False when something is missing before or behind them: ask for what follows ``have``.

        """
        self._stable = max(self._stable, stable)
        if first <= self.have + 1:
            new = events[self.have + 1 - first :] if first <= self.have else events
            for event in new[: self._bound - len(self._queue)]:
                self.have += 1
                self._queue.append((Position(self.turn, self.have), event))
        self._move_head()
        return self.have >= first + len(events) - 1

    def group_ready(self) -> None:
        """All ranks of the group have heard of this epoch."""
        self._group_ready = True
        self._move_head()

    def reaches(self, head: Head) -> bool:
        """Whether this rank has everything up to ``head``."""
        if head.epoch == self.epoch:
            return self.have >= head.number
        past = self._past.get(head.epoch)
        return past is not None and past.have >= head.number

    def drain(self) -> list[Event]:
        """Hand over everything that has arrived."""
        events = [event for _, event in self._queue]
        self._queue.clear()
        self.drained = Position(self.turn, self.have)
        return events

    def drain_through(self, head: Head) -> list[Event]:
        """Hand over exactly the events up to ``head``, which this rank ``reaches``."""
        turn = self.turn if head.epoch == self.epoch else self._past[head.epoch].turn
        limit = Position(turn, head.number)
        queue = self._queue
        events = []
        while queue and queue[0][0] <= limit:
            events.append(queue.popleft()[1])
        self.drained = max(self.drained, limit)
        return events

    def _move_head(self) -> None:
        if self._group_ready and self._head != (self.epoch, number := min(self._stable, self.have)):
            self._head = Head(self.epoch, number)
            self.token = self._head.pack()
