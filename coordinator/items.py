"""Which handoff an item of a rank is about, and what it means for that one.

Rooms are used again, so every item of a rank says up to which event its engine had drained when it
was made (``after``). An item that was made before the engine drained the verdict of the room's
last attempt means that attempt, and is late; any other one means the present attempt or opens one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from coordinator.events import Event, Extended, Moved, MoveFailed, Offered, Opened, Sent
from coordinator.logs import get_logger
from coordinator.messages import (
    EXTERNAL,
    Cancel,
    Extend,
    Item,
    LegDone,
    LegFailed,
    LegQuiet,
    Offer,
    Open,
    Refused,
    Role,
    Send,
)
from coordinator.page_lists import bad_pages
from coordinator.reasons import Failure, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.groups import Rank
    from coordinator.handoff import Handoff
    from coordinator.metrics import Counters
    from coordinator.rooms import Rooms

#: What only a prefill rank says. A tuple: a union would be built anew for each item.
PREFILL_ITEMS: Final = (Open, Send, LegDone, LegFailed, LegQuiet)
#: What only a rank says whose engine moves the pages by itself.
OWN_ITEMS: Final = (LegDone, LegFailed, LegQuiet)

_log = get_logger()


class Items:
    """Takes what ranks say."""

    def __init__(self, rooms: Rooms, counters: Counters) -> None:
        """Speak of the handoffs in ``rooms``."""
        self._rooms = rooms
        self._counters = counters
        self._handlers: dict[type, Callable[[Rank, Item], Refused | None]] = {
            Open: self._open,
            Send: self._send,
            Offer: self._offer,
            Extend: self._extend,
            Cancel: self._cancel,
            LegDone: self._leg_ended,
            LegFailed: self._leg_ended,
            LegQuiet: self._leg_quiet,
        }

    def handle(self, rank: Rank, item: Item) -> Refused | None:
        """Take one item of a rank; returns what to answer when it is not accepted."""
        role = Role.PREFILL if isinstance(item, PREFILL_ITEMS) else Role.DECODE
        if role is not rank.group.role and not isinstance(item, Cancel):
            return self._refused(rank, item, f"a {rank.group.role} rank cannot say {type(item).__name__}")
        if isinstance(item, OWN_ITEMS) and not rank.group.moves_itself:
            return self._refused(
                rank, item, f"only a rank of backend {EXTERNAL!r} can say {type(item).__name__}"
            )
        return self._handlers[type(item)](rank, item)

    # The items, one by one

    def _open(self, rank: Rank, item: Item) -> Refused | None:
        handoff = self._of(rank, item)
        return self._apply(handoff, rank, item, Opened(rank.number)) if handoff else None

    def _send(self, rank: Rank, item: Item) -> Refused | None:
        assert isinstance(item, Send)  # noqa: S101 - the table of handlers says so
        handoff = self._of(rank, item)
        if handoff is None:
            return None
        problem = bad_pages(item.pages, rank, handoff.machine.sent_pages(rank.number))
        if problem:
            return self._spoilt(handoff, rank, item, problem)
        return self._apply(handoff, rank, item, Sent(rank.number, item.pages, item.last, item.aux))

    def _offer(self, rank: Rank, item: Item) -> Refused | None:
        assert isinstance(item, Offer)  # noqa: S101 - the table of handlers says so
        handoff = self._of(rank, item)
        if handoff is None:
            return None
        problem = bad_pages(item.pages, rank, 0)
        if problem:
            return self._spoilt(handoff, rank, item, problem)
        return self._apply(handoff, rank, item, Offered(rank.number, item.pages, item.prefix_pages))

    def _extend(self, rank: Rank, item: Item) -> Refused | None:
        handoff = self._of(rank, item)
        return self._apply(handoff, rank, item, Extended(rank.number)) if handoff else None

    def _cancel(self, rank: Rank, item: Item) -> Refused | None:
        assert isinstance(item, Cancel)  # noqa: S101 - the table of handlers says so
        ended = self._rooms.endings.get(item.room)
        if item.room not in self._rooms.active and ended is not None and ended.unaware is not rank.group.role:
            if not self._is_late(rank, item):
                return self._refused(rank, item, f"room {item.room} is not in flight")
            return None
        handoff = self._of(rank, item)
        if handoff is not None:
            prefill = rank.group.role is Role.PREFILL
            reason = Reason.CANCELLED_BY_PREFILL if prefill else Reason.CANCELLED_BY_DECODE
            handoff.fail(reason, item.why or "cancelled by the engine", rank.name)
        return None

    def _leg_ended(self, rank: Rank, item: Item) -> Refused | None:
        """An engine's own transfer is over; it never begins a handoff."""
        if self._is_late(rank, item):
            return None
        handoff = self._rooms.active.get(item.room)
        if handoff is None or handoff.prefill is not rank.group:
            return self._refused(rank, item, f"room {item.room} is not in flight")
        if isinstance(item, LegFailed):
            failure = Failure(Reason.TRANSPORT, rank.name, item.message or "the engine's own transfer failed")
            return self._apply(handoff, rank, item, MoveFailed(rank.number, failure, item.quiet, item.quiet))
        return self._apply(handoff, rank, item, Moved(rank.number))

    def _leg_quiet(self, rank: Rank, item: Item) -> Refused | None:
        assert isinstance(item, LegQuiet)  # noqa: S101 - the table of handlers says so
        self._rooms.own_pages.told(rank, item)
        return None

    # Which attempt is meant

    def _of(self, rank: Rank, item: Item) -> Handoff | None:
        """Find or open the attempt that an item means; None when it is late or cannot be opened."""
        if self._is_late(rank, item):
            return None
        group = rank.group
        handoff = self._rooms.active.get(item.room)
        if handoff is None:
            return self._rooms.begin(rank, item.room)
        bound = handoff.prefill if group.role is Role.PREFILL else handoff.decode
        if bound is None:
            self._rooms.bind(handoff, group)
            return handoff if not handoff.machine.state.terminal else None
        if bound is not group:
            message = (
                f"room {item.room} is in flight with {bound.name}; a room id must not be used twice at a time"
            )
            self._rooms.stillborn(group, item.room, Failure(Reason.REJECTED, rank.name, message))
            return None
        return handoff

    def _is_late(self, rank: Rank, item: Item) -> bool:
        number = rank.group.ended.get(item.room)
        if number is None or item.after >= number:
            return False
        kind = type(item).__name__.lower()
        self._counters.late[kind] += 1
        _log.info("item.late", rank=rank.name, room=item.room, item=kind)
        return True

    def _apply(self, handoff: Handoff, rank: Rank, item: Item, event: Event) -> Refused | None:
        refusal = handoff.apply(event)
        return None if refusal is None else self._refused(rank, item, f"room {item.room}: {refusal.message}")

    def _spoilt(self, handoff: Handoff, rank: Rank, item: Item, problem: str) -> Refused:
        """A member's item is unusable: without it the handoff cannot succeed, so it fails now."""
        handoff.fail(Reason.REJECTED, problem, rank.name)
        return self._refused(rank, item, f"room {item.room}: {problem}")

    def _refused(self, rank: Rank, item: Item, message: str) -> Refused:
        kind = type(item).__name__.lower()
        self._counters.refused[kind] += 1
        _log.warning("item.refused", rank=rank.name, room=item.room, item=kind, error=message)
        return Refused(kind, message, item.room)
