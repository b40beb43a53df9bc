"""What a rank remembers for a coordinator that has to start anew, and can learn it nowhere else.

Sans-IO: no socket, no clock, no lock; whoever shares a recollection between threads guards it.

Theory of operation
    Three things are kept. The last events: what some other rank of the group may lack. The rooms
    in flight: those of which a coordinator has heard from this rank, perhaps, and whose verdict this
    rank has not. What surely did not reach one is submitted to the next, and the room begins anew,
    unless it turns out that it has a verdict already. (What may have reached one must not: bytes that
    it had written may still land, on pages that decode goes on filling after a success.) And the
    attempts that have a verdict, and pages that were not released. A prefill rank also keeps the side
    data that it has sent, also after a success: they reach decode with the verdict, or not.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from coordinator.messages import (
    MAX_HELD,
    MAX_REMEMBERED,
    Held,
    LegDone,
    LegFailed,
    LegQuiet,
    Memory,
    Offer,
    Open,
    Outcome,
    Send,
    SideData,
    Unreleased,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.messages import Event, Item

#: Bound of the aux blobs of the events that are kept, and of those sent: a ``Hello`` is one frame.
_MAX_AUX_BYTES: Final = 1 << 21
#: Bound of the aux blobs of rooms in flight; what is beyond it is not kept.
_MAX_SENDING_BYTES: Final = 1 << 24
#: How many ended rooms are remembered: rooms are used again, and speaking of one may be late.
_MAX_ENDED: Final = 16384


class _InFlight:
    """A room of which this rank has spoken since its last verdict.

    ``since`` and ``after``: the last event that the engine had drained when it first and last did.
    ``submitted``: a coordinator may have heard of it.
    ``aux``: the side data that it sent with its last pages; None before that, or when it is not kept.
    ``quiet``: this rank has told that its own engine reads the pages no more.
    """

    __slots__ = ("after", "aux", "quiet", "since", "submitted")

    def __init__(self, after: int) -> None:
        self.since = after
        self.after = after
        self.submitted = False
        self.aux: bytes | None = None
        self.quiet = False


class Recollection:
    """What one rank remembers of its group."""

    __slots__ = (
        "_aux_bytes",
        "_ended",
        "_events",
        "_in_flight",
        "_sending_bytes",
        "_sent",
        "_sent_bytes",
        "_unreleased",
    )

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._aux_bytes = 0
        self._in_flight: dict[int, _InFlight] = {}
        # Room -> number of its last verdict, and which attempt that was.
        self._ended: OrderedDict[int, tuple[int, int]] = OrderedDict()
        # Room and attempt -> whether this rank has told that its own engine reads the pages no more.
        self._unreleased: dict[tuple[int, int], bool] = {}
        self._sent: deque[SideData] = deque()
        self._sending_bytes = self._sent_bytes = 0

    def spoke(self, item: Item) -> None:
        """The engine has said ``item``."""
        if isinstance(item, LegDone | LegFailed | LegQuiet):
            self._note_quiet(item)
        if not isinstance(item, Send | Offer | Open):
            return  # Nothing is begun by it.
        room = self._in_flight.get(item.room)
        if room is not None:
            room.after = item.after
        elif item.room not in self._ended or self._ended[item.room][0] <= item.after:
            room = self._in_flight[item.room] = _InFlight(item.after)
        if room is not None and room.aux is None and isinstance(item, Send) and item.last:
            self._keep(room, item.aux)

    def submitted(self, items: Sequence[Item]) -> None:
        """A connection to a coordinator has taken ``items``."""
        for item in items:
            room = self._in_flight.get(item.room)
            # One of an earlier attempt says nothing about this one.
            if room is not None and item.after >= room.since:
                room.submitted = True

    def heard(self, first: int, events: Sequence[Event]) -> None:
        """The events from number ``first`` on have arrived."""
        for number, event in enumerate(events, first):
            self._events.append(event)
            if isinstance(event, Outcome):
                self._aux_bytes += len(event.aux)
                room = self._in_flight.pop(event.room, None)
                self._over(event, room)
                self._unreleased[event.room, event.attempt] = room is not None and room.quiet
                self._ended[event.room] = (number, event.attempt)
                self._ended.move_to_end(event.room)
            else:
                self._unreleased.pop((event.room, event.attempt), None)
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        while len(self._events) > MAX_REMEMBERED or self._aux_bytes > _MAX_AUX_BYTES:
            dropped = self._events.popleft()
            if isinstance(dropped, Outcome):
                self._aux_bytes -= len(dropped.aux)

    def _note_quiet(self, item: LegDone | LegFailed | LegQuiet) -> None:
        """Note that this rank reads its pages no more: of the attempt in flight, or of a failed one."""
        if isinstance(item, LegQuiet):
            if (item.room, item.attempt) in self._unreleased:
                self._unreleased[item.room, item.attempt] = True
            return
        room = self._in_flight.get(item.room)
        if room is not None:
            room.quiet = not isinstance(item, LegFailed) or item.quiet

    def _keep(self, room: _InFlight, aux: bytes) -> None:
        if self._sending_bytes + len(aux) <= _MAX_SENDING_BYTES:
            room.aux = aux
            self._sending_bytes += len(aux)

    def _over(self, outcome: Outcome, room: _InFlight | None) -> None:
        """Keep the side data of a room that has succeeded; forget those of another one."""
        if room is None or room.aux is None:
            return
        self._sending_bytes -= len(room.aux)
        if outcome.succeeded:
            self._sent.append(SideData(outcome.room, outcome.attempt, room.aux))
            self._sent_bytes += len(room.aux)
        while len(self._sent) > MAX_REMEMBERED or self._sent_bytes > _MAX_AUX_BYTES:
            self._sent_bytes -= len(self._sent.popleft().aux)

    def report(self, base: int, lineage: int = 0) -> Memory:
        """Return all of it, within the bounds of the message.

        ``base``: what came up to this number was before this rank's time. ``lineage``: its group's.
        """
        held: list[Held] = []
        said: list[Held] = []
        for room, flight in self._in_flight.items():
            told = held if flight.submitted else said
            told.append(Held(room, max(flight.after, base), self._ended.get(room, (0, 0))[1]))
        unreleased = [Unreleased(*key, quiet) for key, quiet in self._unreleased.items()]
        return Memory(
            list(self._events),
            held[:MAX_HELD],
            unreleased[:MAX_HELD],
            self._side_data(),
            said[: MAX_HELD - len(held)],
            lineage,
        )

    def _side_data(self) -> list[SideData]:
        """Return those of the last successes, then of rooms of which only others may have heard one."""
        told, size_bytes = list(self._sent), self._sent_bytes
        for room, flight in self._in_flight.items():
            aux = flight.aux
            if aux is None or size_bytes + len(aux) > _MAX_AUX_BYTES:
                continue
            if len(told) == MAX_REMEMBERED:
                break
            told.append(SideData(room, 0, aux, flight.after))
            size_bytes += len(aux)
        return told
