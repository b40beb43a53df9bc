"""Pages of failed handoffs that only their engine can say to be quiet: it moves them by itself.

Nobody can fence an engine from itself, so each of its ranks is waited for: until it says that it reads
the pages no more (``LegQuiet``), or its process has ended. Rooms are used again, so several attempts of
one may be held at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.events import MoveQuiet, Paired, Pairing
from coordinator.handoff import Handoff
from coordinator.messages import LegQuiet, Role, Unreleased
from coordinator.reasons import Failure, Reason

if TYPE_CHECKING:
    from coordinator.groups import Group, Rank
    from coordinator.handoff import Desk

#: Of an attempt whose verdict is not remembered any more.
FORGOTTEN = Failure(Reason.COORDINATOR_RESTARTED, "", "it had failed under a former coordinator")


class OwnPages:
    """The failed handoffs of such engines that are not quiet, by room."""

    def __init__(self) -> None:
        """Start empty."""
        self._held: dict[int, list[Handoff]] = {}

    def hold(self, handoff: Handoff) -> None:
        """Wait for the ranks of a failed handoff."""
        self._held.setdefault(handoff.room, []).append(handoff)

    def let_go(self, handoff: Handoff) -> None:
        """A handoff is quiet, or was never held."""
        held = self._held.get(handoff.room)
        if held is None or handoff not in held:
            return
        held.remove(handoff)
        if not held:
            del self._held[handoff.room]

    def told(self, rank: Rank, item: LegQuiet) -> None:
        """A rank reads its pages of a failed attempt no more; it may be quiet already."""
        handoff = self._find(rank.group, item.room, item.attempt)
        if handoff is not None:
            _quieten(handoff, rank)

    def dead(self, rank: Rank) -> None:
        """Nothing is read any more by a rank whose process has ended."""
        for held in list(self._held.values()):
            for handoff in list(held):
                if handoff.prefill is rank.group:
                    _quieten(handoff, rank)

    def take_over(self, rank: Rank, left: Unreleased, failure: Failure | None, desk: Desk) -> None:
        """Hold what a former coordinator has not released, as ``rank`` remembers; ``failure``, if known."""
        group = rank.group
        handoff = self._find(group, left.room, left.attempt)
        if handoff is None:
            handoff = Handoff(left.room, left.attempt, desk)
            handoff.told_before = True
            handoff.prefill = group
            handoff.apply(Paired(Pairing.of_own(group.world_size)))
            failure = failure or FORGOTTEN
            handoff.fail(failure.reason, failure.message, failure.origin)
        if left.quiet:
            _quieten(handoff, rank)

    def _find(self, group: Group, room: int, attempt: int) -> Handoff | None:
        held = self._held.get(room, ())
        return next((one for one in held if one.prefill is group and one.machine.attempt == attempt), None)


def _quieten(handoff: Handoff, rank: Rank) -> None:
    """Both ends of a rank's own move are quiet; it may be so already."""
    for side in Role:
        handoff.apply(MoveQuiet(rank.number, side))
