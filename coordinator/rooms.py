"""The handoffs in flight, and what the groups are told of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from coordinator import trail
from coordinator.endings import Ended, Endings
from coordinator.events import Event, Paired, Pairing, StartMove
from coordinator.handoff import Handoff
from coordinator.logs import get_logger
from coordinator.messages import Elsewhere, Outcome, Released, Role
from coordinator.own_pages import OwnPages
from coordinator.pairing import pairing
from coordinator.reasons import Failure, Reason
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

#: How many ended handoffs are kept with their whole story, for operators.
RECENT: Final = 1024

#: Why a success that no rank of decode has heard is a failure to it.
SIDE_DATA_LOST: Final = (
    "the coordinator was restarted: the pages have arrived, but the side data that came with the verdict "
    "are lost"
)

_log = get_logger()


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
        self.endings = Endings()
        self._offers: Watch[Handoff] = Watch(config.handoff.offer_ttl_s, self._abandoned)

    def begin(self, rank: Rank, room: int) -> Handoff | None:
        """Begin the next attempt of a room; None when it is over already, or not wanted."""
        group = rank.group
        ended = self.endings.get(room)
        if ended is not None and ended.unaware is group.role and self._is_about(ended, rank):
            # It was over before this side ever spoke of it, or before this side heard of its verdict.
            self.adopt(group, room, ended)
            return None
        failure = self._unwelcome(group)
        if failure is not None:
            self.stillborn(group, room, failure)
            return None
        handoff = self.admit(room, self.endings.next_attempt(room))
        self.bind(handoff, group)
        trail.step(handoff, "handoff.opened")
        return handoff

    def _is_about(self, ended: Ended, rank: Rank) -> bool:
        """Whether what an unaware side says now can be about that attempt; else the room is used again.

        An engine that was started after the verdict was not meant by it.
        """
        if rank.joined_at_s > ended.at_s:
            return False
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

    def stillborn(self, group: Group, room: int, failure: Failure) -> None:
        """Tell a group that a room of its has failed before it could begin. Counts as a handoff."""
        attempt = self.endings.next_attempt(room)
        self._counters.opened += 1
        self._counters.failed[failure.reason] += 1
        if room not in self.active:
            other = Role.DECODE if group.role is Role.PREFILL else Role.PREFILL
            self.endings.remember(room, Ended(attempt, failure, other, _next_of(group)))
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
        self.endings.remember(room, ended)
        # Both logs first: making room in one that overflows may end other handoffs.
        if prefill is not None:
            self._append(prefill, Outcome(room, machine.attempt, failure, b"", at_decode))
            if failure is not None and prefill.moves_itself:
                self.own_pages.hold(handoff)
        if decode is not None:
            aux = machine.aux if failure is None else b""
            self._append(decode, Outcome(room, machine.attempt, failure, aux, at_prefill))
        for group in handoff.groups:
            group.handoffs.discard(handoff)
            self._publish(group)
        self._account(handoff)

    def _account(self, handoff: Handoff) -> None:
        """Count and log a verdict, and note whether it leaves pages behind."""
        self._counters.concluded(handoff)
        handoff.held_nothing = not handoff.machine.held
        if not handoff.held_nothing:
            self.endings.hold(handoff.room)
        trail.outcome(handoff)

    def _hold_on(self, handoff: Handoff) -> None:
        """Hold what a former coordinator has told to have failed, and has not released."""
        self.unreleased.add(handoff)
        self.endings.hold(handoff.room)
        self.own_pages.hold(handoff)

    def released(self, handoff: Handoff, side: Role) -> None:
        """Tell one side that its pages are quiet."""
        machine = handoff.machine
        group = handoff.prefill if side is Role.PREFILL else handoff.decode
        if group is not None and machine.room in group.unproven:
            self.release(group, machine.room, machine.attempt)
        elif group is not None:
            self.tell(group, Released(machine.room, machine.attempt))
        if not handoff.held_nothing:  # else the line of the outcome says it
            trail.released(handoff, side)
        self.releases.changed(handoff)

    def late(self, handoff: Handoff, event: Event) -> None:
        """Count and log an event that came after the verdict."""
        kind = type(event).__name__.lower()
        self._counters.late[kind] += 1
        _log.info("handoff.late", **trail.who(handoff), event_kind=kind, state=handoff.machine.state.value)

    def prefill_completed(self, handoff: Handoff) -> None:
        """Note that the clock of a handoff runs."""
        self.past_prefill[handoff] = None
        trail.step(handoff, "handoff.prefill_complete")

    def all_moving(self, handoff: Handoff) -> None:
        """Note that a handoff lacks nothing but bytes."""
        self.moving += 1
        trail.step(handoff, "handoff.moving")

    def _leave(self, handoff: Handoff) -> None:
        """Count a handoff no longer among those in flight."""
        self.past_prefill.pop(handoff, None)
        if handoff.moving_at_s:
            self.moving -= 1

    async def make_quiet(self, handoff: Handoff) -> None:
        """Wait, then use force, until nothing of a failed handoff moves any more."""
        await self.releases.make_quiet(handoff)

    def closed(self, handoff: Handoff) -> None:
        """Forget the handoff."""
        self.unreleased.discard(handoff)
        self.own_pages.let_go(handoff)
        if not handoff.held_nothing:
            self.endings.let_go(handoff.room)
        handoff.machine.aux = b""  # up to 1 MiB, which the log of decode's group has
        if handoff.machine.failure is not None:
            self.quarantine.let_go(handoff)
            held_s = asyncio.get_running_loop().time() - handoff.concluded_at_s
            self._counters.release_s.observe(held_s)

    def broken(self, handoff: Handoff, error: Exception) -> None:
        """Log a bug; the pages of this handoff stay held."""
        self._counters.bugs += 1
        _log.error("handoff.broken", **trail.who(handoff), exc_info=error)

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


def _next_of(group: Group) -> Elsewhere:
    """Where the next event of a group will be."""
    return Elsewhere(group.lineage, group.log.head + 1)
