"""Which handoff a message is about, and what the groups are told of it.

Rooms are used again, so every item of a rank says up to which event its engine had drained when it
was made (``after``). An item that was made before the engine drained the verdict of the room's
last attempt means that attempt, and is late; any other one means the present attempt or opens one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from coordinator.events import (
    Event,
    Extended,
    Moved,
    MoveFailed,
    Offered,
    Opened,
    Paired,
    Pairing,
    Sent,
    StartMove,
)
from coordinator.handoff import Handoff
from coordinator.layout import Layout, mismatches
from coordinator.logs import get_logger
from coordinator.messages import (
    EXTERNAL,
    Cancel,
    Elsewhere,
    Extend,
    Item,
    LegDone,
    LegFailed,
    LegQuiet,
    Offer,
    Open,
    Outcome,
    Refused,
    Released,
    Role,
    Send,
)
from coordinator.own_pages import OwnPages
from coordinator.page_lists import bad_pages
from coordinator.reasons import Failure, Reason
from coordinator.slices import legs
from coordinator.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.broadcast import Broadcaster
    from coordinator.config import Config
    from coordinator.groups import Group, Rank
    from coordinator.metrics import Counters
    from coordinator.quarantine import Quarantine
    from coordinator.release import Releases
    from coordinator.transfers import Transfers

#: How many ended rooms are remembered, for their attempt numbers and for sides that never heard.
REMEMBERED: Final = 16384
#: How many ended handoffs are kept with their whole story, for operators.
RECENT: Final = 1024

#: Why a success that no rank of decode has heard is a failure to it.
SIDE_DATA_LOST: Final = (
    "the coordinator was restarted: the pages have arrived, but the side data that came with the verdict "
    "are lost"
)

#: What only a prefill rank says. A tuple: a union would be built anew for each item.
PREFILL_ITEMS: Final = (Open, Send, LegDone, LegFailed, LegQuiet)
#: What only a rank says whose engine moves the pages by itself.
OWN_ITEMS: Final = (LegDone, LegFailed, LegQuiet)

_log = get_logger()


class Ended(msgspec.Struct):
    """The last attempt of a room, and how it ended.

    ``unaware`` is the side that was not known when it failed, and has not heard of it, if any;
    ``elsewhere`` is where the other one has. One that is ``inherited`` is known from a former coordinator's
    ranks, and may have been told to that side all the same. ``aux`` are the side data of a success, None
    when nobody remembers them.
    """

    attempt: int
    failure: Failure | None
    unaware: Role | None = None
    elsewhere: Elsewhere | None = None
    inherited: bool = False
    aux: bytes | None = None


@lru_cache(maxsize=256)
def pairing(prefill: Layout, prefill_world: int, decode: Layout, decode_world: int) -> Pairing | str:
    """How the ranks of two groups exchange pages, or a sentence that says why they cannot."""
    problems = mismatches(prefill, decode)
    if problems:
        return "; ".join(problems)
    pairs = legs(prefill, prefill_world, decode, decode_world)
    return Pairing.of(prefill_world, decode_world, pairs)


class Rooms:
    """The handoffs in flight, by room, and the desk that each of them works from.

    Attributes:
        active: those without a verdict, the oldest first.
        past_prefill: those of them whose clock runs, the longest first; ``moving`` of them lack only bytes.
        unreleased: those with a verdict whose pages are not quiet.
        recent: the last ones of all that have ended, by room.
        draining: nothing new is admitted.

    """

    def __init__(
        self, config: Config, broadcaster: Broadcaster, transfers: Transfers, counters: Counters
    ) -> None:
        """Start empty."""
        self.bounds = config.handoff
        self.active: dict[int, Handoff] = {}
        self.past_prefill: dict[Handoff, None] = {}
        self.moving = 0
        self.unreleased: set[Handoff] = set()
        self.own_pages = OwnPages()
        self.recent: OrderedDict[int, Handoff] = OrderedDict()
        self.draining: bool = False
        self.gathers_until_s = 0.0
        self.releases: Releases
        self.quarantine: Quarantine
        self.overflowed: Callable[[Group], None]
        self.met: Callable[[Handoff], None] = lambda _: None
        self.release: Callable[[Group, int, int], None] = self._release
        self._limits = config.limits
        self._broadcaster = broadcaster
        self._transfers = transfers
        self._counters = counters
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        self._offers: Watch[Handoff] = Watch(config.handoff.offer_ttl_s, self._abandoned)
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
        ended = self._ended.get(item.room)
        if item.room not in self.active and ended is not None and ended.unaware is not rank.group.role:
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
        handoff = self.active.get(item.room)
        if handoff is None or handoff.prefill is not rank.group:
            return self._refused(rank, item, f"room {item.room} is not in flight")
        if isinstance(item, LegFailed):
            failure = Failure(Reason.TRANSPORT, rank.name, item.message or "the engine's own transfer failed")
            return self._apply(handoff, rank, item, MoveFailed(rank.number, failure, item.quiet, item.quiet))
        return self._apply(handoff, rank, item, Moved(rank.number))

    def _leg_quiet(self, rank: Rank, item: Item) -> Refused | None:
        assert isinstance(item, LegQuiet)  # noqa: S101 - the table of handlers says so
        self.own_pages.told(rank, item)
        return None

    # Which attempt is meant

    def _of(self, rank: Rank, item: Item) -> Handoff | None:
        """Find or open the attempt that an item means; None when it is late or cannot be opened."""
        if self._is_late(rank, item):
            return None
        group = rank.group
        handoff = self.active.get(item.room)
        if handoff is None:
            return self._opened(rank, item.room)
        bound = handoff.prefill if group.role is Role.PREFILL else handoff.decode
        if bound is None:
            self.bind(handoff, group)
            return handoff if not handoff.machine.state.terminal else None
        if bound is not group:
            message = (
                f"room {item.room} is in flight with {bound.name}; a room id must not be used twice at a time"
            )
            self._stillborn(group, item.room, Failure(Reason.REJECTED, rank.name, message))
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

    def _opened(self, rank: Rank, room: int) -> Handoff | None:
        ended = self._ended.get(room)
        if ended is not None and ended.unaware is rank.group.role and self._is_about(ended):
            # It was over before this side ever spoke of it, or before this side heard of its verdict.
            self.adopt(rank.group, room, ended)
            return None
        failure = self._unwelcome(rank.group)
        if failure is not None:
            self._stillborn(rank.group, room, failure)
            return None
        handoff = self.admit(room, self._next_attempt(room))
        self.bind(handoff, rank.group)
        self._trail(handoff, "handoff.opened")
        return handoff

    def _is_about(self, ended: Ended) -> bool:
        """Whether what an unaware side says now can be about that attempt; else the room is used again."""
        return not ended.inherited or asyncio.get_running_loop().time() < self.gathers_until_s

    def _unwelcome(self, group: Group) -> Failure | None:
        """Say why no handoff of ``group`` can begin now."""
        limits = self._limits
        if self.draining:
            return Failure(Reason.DRAINING, "", "the coordinator is draining; try another prefill node")
        if len(self.active) >= limits.max_handoffs:
            why = f"limits.max_handoffs = {limits.max_handoffs} handoffs are in flight"
            return Failure(Reason.REJECTED, "", why)
        if group.role is Role.DECODE and len(self._offers) >= limits.max_offers:
            why = f"limits.max_offers = {limits.max_offers} offers wait for prefill already"
            return Failure(Reason.REJECTED, "", why)
        return None

    def admit(self, room: int, attempt: int) -> Handoff:
        """Begin a handoff that no group is part of yet."""
        handoff = self.active[room] = Handoff(room, attempt, self)
        self._counters.opened += 1
        return handoff

    def withdraw(self, handoff: Handoff, failure: Failure | None) -> None:
        """End a handoff that turns out to have had a verdict before it began; ``failure`` is that."""
        del self.active[handoff.room]
        self._counters.inherited(None if failure is None else failure.reason)
        self._leave(handoff)
        self._offers.discard(handoff)
        for group in handoff.groups:
            group.handoffs.discard(handoff)
        handoff.withdraw()

    def adopt(self, group: Group, room: int, ended: Ended) -> None:
        """Tell a group the verdict of a handoff that was decided without it."""
        failure, aux = ended.failure, b""
        if failure is None and group.role is Role.DECODE:
            # KV and side data are one fact, and the side data went with the word that never arrived.
            failure = Failure(Reason.COORDINATOR_RESTARTED, "", SIDE_DATA_LOST) if ended.aux is None else None
            aux = ended.aux or b""
        ended.unaware = ended.aux = None
        self.tell(group, Outcome(room, ended.attempt, failure, aux, ended.elsewhere))
        self.release(group, room, ended.attempt)
        _log.info(
            "handoff.adopted", group=group.name, room=room, attempt=ended.attempt,
            outcome="succeeded" if failure is None else "failed",
        )  # fmt: skip

    def ended(self, room: int) -> Ended | None:
        """How the last attempt of a room ended, as far as it is remembered."""
        return self._ended.get(room)

    def _next_attempt(self, room: int) -> int:
        ended = self._ended.get(room)
        return ended.attempt + 1 if ended is not None else 1

    def _release(self, group: Group, room: int, attempt: int) -> None:
        self.tell(group, Released(room, attempt))

    def bind(self, handoff: Handoff, group: Group) -> None:
        """Make a group part of a handoff; with the second one its legs are known."""
        if group.role is Role.PREFILL:
            handoff.prefill = group
            self._offers.discard(handoff)
        else:
            handoff.decode = group
        group.handoffs.add(handoff)
        if group.moves_itself:
            # First of all: whatever becomes of it, each of its ranks has to tell that its pages are quiet.
            handoff.apply(Paired(Pairing.of_own(group.world_size)))
            self.met(handoff)
            return
        prefill, decode = handoff.prefill, handoff.decode
        if prefill is None or decode is None:
            if group.role is Role.DECODE:
                self._offers.sign(handoff)
            return
        pair = pairing(prefill.layout, prefill.world_size, decode.layout, decode.world_size)
        if isinstance(pair, str):
            handoff.fail(Reason.INCOMPATIBLE, f"{prefill.name} and {decode.name} do not fit: {pair}")
        else:
            self.met(handoff)
            if not handoff.machine.state.terminal:
                handoff.apply(Paired(pair))

    def _abandoned(self, handoff: Handoff) -> None:
        handoff.fail(
            Reason.ABANDONED,
            f"no sign of prefill for this room within {self._offers.bound_s:g} s of decode's first",
        )

    def _stillborn(self, group: Group, room: int, failure: Failure) -> None:
        """Tell a group that a room of its has failed before it could begin. Counts as a handoff."""
        attempt = self._next_attempt(room)
        self._counters.opened += 1
        self._counters.failed[failure.reason] += 1
        if room not in self.active:
            other = Role.DECODE if group.role is Role.PREFILL else Role.PREFILL
            self.remember(room, Ended(attempt, failure, other, _next_of(group)))
        self.tell(group, Outcome(room, attempt, failure))
        self.tell(group, Released(room, attempt))
        _log.info(
            "handoff.outcome", group=group.name, room=room, attempt=attempt, outcome="failed",
            reason=failure.reason, origin=failure.origin, message=failure.message,
        )  # fmt: skip

    # The desk of a handoff (see ``coordinator.handoff.Desk``)

    def start_move(self, handoff: Handoff, move: StartMove) -> None:
        """Have the bytes of a move written."""
        self._transfers.start(handoff, move)

    def revoke(self, handoff: Handoff, moves: tuple[int, ...]) -> None:
        """Tell the workers that these moves need not be started any more."""
        self.quarantine.hold(handoff, sum(flight.size_bytes for flight in handoff.flights.values()))
        self._transfers.revoke(handoff, moves)

    def concluded(self, handoff: Handoff) -> None:
        """Tell the verdict to both groups."""
        machine = handoff.machine
        room, failure = machine.room, machine.failure
        if handoff.told_before:
            self._hold_on(handoff)
            return
        if self.active.get(room) is handoff:
            del self.active[room]
        self._leave(handoff)
        self.unreleased.add(handoff)
        self.recent[room] = handoff
        self.recent.move_to_end(room)
        if len(self.recent) > RECENT:
            self.recent.popitem(last=False)
        self._offers.discard(handoff)
        prefill, decode = handoff.prefill, handoff.decode
        at_prefill = None if prefill is None else _next_of(prefill)
        at_decode = None if decode is None else _next_of(decode)
        ended = Ended(machine.attempt, failure)
        if prefill is None:
            ended.unaware, ended.elsewhere = Role.PREFILL, at_decode
        elif decode is None:
            ended.unaware, ended.elsewhere = Role.DECODE, at_prefill
        self.remember(room, ended)
        # Both logs first: making room in one that overflows may end other handoffs.
        if prefill is not None:
            self._append(prefill, Outcome(room, machine.attempt, failure, b"", at_decode))
            if failure is not None and prefill.moves_itself:
                self.own_pages.hold(handoff, prefill.log.head)
        if decode is not None:
            aux = machine.aux if failure is None else b""
            self._append(decode, Outcome(room, machine.attempt, failure, aux, at_prefill))
        for group in handoff.groups:
            group.handoffs.discard(handoff)
            self._publish(group)
        self._counters.concluded(handoff)
        handoff.held_nothing = not machine.held
        self._log_outcome(handoff)

    def _hold_on(self, handoff: Handoff) -> None:
        """Hold what a former coordinator has told to have failed, and has not released."""
        self.unreleased.add(handoff)
        group, known = handoff.prefill, self._ended.get(handoff.room)
        assert group is not None  # noqa: S101 - it is taken over from there
        is_last = known is not None and known.attempt == handoff.machine.attempt
        self.own_pages.hold(handoff, group.ended.get(handoff.room, 0) if is_last else 0)

    def released(self, handoff: Handoff, side: Role) -> None:
        """Tell one side that its pages are quiet."""
        machine = handoff.machine
        group = handoff.prefill if side is Role.PREFILL else handoff.decode
        if group is not None and machine.room in group.unproven:
            self.release(group, machine.room, machine.attempt)
        elif group is not None:
            self.tell(group, Released(machine.room, machine.attempt))
        if not handoff.held_nothing:  # else the line of the outcome says it
            self._log_released(handoff, side)
        self.releases.changed(handoff)

    def _log_released(self, handoff: Handoff, side: Role) -> None:
        first = handoff.released_together is None
        if first:
            handoff.released_together = not handoff.machine.held
        if first and handoff.released_together:
            return  # The other side follows: one line for both.
        held_s = asyncio.get_running_loop().time() - handoff.concluded_at_s
        _log.info(
            "handoff.released",
            **self._who(handoff),
            side="both" if handoff.released_together else side.value,
            held_s=round(held_s, 4),
        )

    def late(self, handoff: Handoff, event: Event) -> None:
        """Count and log an event that came after the verdict."""
        kind = type(event).__name__.lower()
        self._counters.late[kind] += 1
        _log.info("handoff.late", **self._who(handoff), event_kind=kind, state=handoff.machine.state.value)

    def prefill_completed(self, handoff: Handoff) -> None:
        """Note that the clock of a handoff runs."""
        self.past_prefill[handoff] = None
        self._trail(handoff, "handoff.prefill_complete")

    def all_moving(self, handoff: Handoff) -> None:
        """Note that a handoff lacks nothing but bytes."""
        self.moving += 1
        self._trail(handoff, "handoff.moving")

    def _leave(self, handoff: Handoff) -> None:
        """Count a handoff no longer among those in flight."""
        self.past_prefill.pop(handoff, None)
        if handoff.moving_at_s:
            self.moving -= 1

    def _trail(self, handoff: Handoff, step: str) -> None:
        """Log a step of a handoff's trail, with how long it took up to here."""
        now_s = asyncio.get_running_loop().time()
        complete_s = handoff.complete_at_s
        _log.info(
            step,
            **self._who(handoff),
            total_s=round(now_s - handoff.opened_at_s, 4),
            after_prefill_s=round(now_s - complete_s, 4) if complete_s else None,
        )

    def _log_outcome(self, handoff: Handoff) -> None:
        failure = handoff.machine.failure
        complete_s = handoff.complete_at_s
        _log.info(
            "handoff.outcome",
            **self._who(handoff),
            **_ending(failure),
            total_s=round(handoff.concluded_at_s - handoff.opened_at_s, 4),
            after_prefill_s=round(handoff.concluded_at_s - complete_s, 4) if complete_s else None,
            bytes=handoff.moved_bytes,
            held=handoff.machine.held,
        )

    async def make_quiet(self, handoff: Handoff) -> None:
        """Wait, then use force, until nothing of a failed handoff moves any more."""
        await self.releases.make_quiet(handoff)

    def closed(self, handoff: Handoff) -> None:
        """Forget the handoff."""
        self.unreleased.discard(handoff)
        self.own_pages.let_go(handoff)
        handoff.machine.aux = b""  # up to 1 MiB, which the log of decode's group has
        if handoff.machine.failure is not None:
            self.quarantine.let_go(handoff)
            held_s = asyncio.get_running_loop().time() - handoff.concluded_at_s
            self._counters.release_s.observe(held_s)

    def broken(self, handoff: Handoff, error: Exception) -> None:
        """Log a bug; the pages of this handoff stay held."""
        self._counters.bugs += 1
        _log.error("handoff.broken", **self._who(handoff), exc_info=error)

    # What they share

    def fail_all(self, handoffs: set[Handoff], reason: Reason, message: str, origin: str = "") -> None:
        """Fail every one of ``handoffs`` that is still in flight."""
        for handoff in list(handoffs):
            handoff.fail(reason, message, origin)

    def reconfigure(self, config: Config) -> None:
        """Use other bounds and limits from now on; the clocks that run are moved by their handoffs."""
        self.bounds = config.handoff
        self._limits = config.limits
        self._offers.rebound(config.handoff.offer_ttl_s)

    def close(self) -> None:
        """Stop the clocks."""
        self._offers.close()

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

    def tell(self, group: Group, event: Outcome | Released) -> None:
        """Add an event to a group's log and have it broadcast."""
        self._append(group, event)
        self._publish(group)

    @staticmethod
    def _append(group: Group, event: Outcome | Released) -> None:
        number = group.log.append(event)
        if isinstance(event, Outcome):
            group.ended.pop(event.room, None)  # so that the newest verdict stands last
            group.ended[event.room] = number
            group.awaits.pop(event.room, None)

    def _publish(self, group: Group) -> None:
        self._broadcaster.publish(group)
        if len(group.log) > self._limits.backlog_events:
            self.overflowed(group)

    def remember(self, room: int, ended: Ended) -> None:
        """Remember how a room ended, and forget the room that ended longest ago."""
        self._ended[room] = ended
        self._ended.move_to_end(room)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    @staticmethod
    def _who(handoff: Handoff) -> dict[str, object]:
        return {
            "group": handoff.prefill.name if handoff.prefill else None,
            "decode": handoff.decode.name if handoff.decode else None,
            "room": handoff.machine.room,
            "attempt": handoff.machine.attempt,
        }


def _ending(failure: Failure | None) -> dict[str, object]:
    """How the line of an outcome tells it."""
    if failure is None:
        return {"outcome": "succeeded"}
    return {
        "outcome": "failed",
        "reason": failure.reason,
        "origin": failure.origin,
        "message": failure.message,
    }


def _next_of(group: Group) -> Elsewhere:
    """Where the next event of a group will be."""
    return Elsewhere(group.lineage, group.log.head + 1)
