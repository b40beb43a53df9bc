"""Pages of failed handoffs that only their engine can say to be quiet: it moves them by itself.

Nobody can fence an engine from itself, so each of its ranks is waited for: until it says that it reads
the pages no more (``LegQuiet``), or its process has ended.

Which attempt does it mean? Rooms are used again, and a rank says it once for each failure that it has
drained. So it means the last verdict that it had drained. Of a room that has had one verdict only, it
may say so before it has drained that.
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
    """The failed handoffs of such engines that are not quiet, by room, in the order of their verdicts."""

    def __init__(self) -> None:
        """Start empty."""
        # With the number of each verdict in its group's log; 0 when it is not known any more.
        self._held: dict[int, list[tuple[int, Handoff]]] = {}

    def hold(self, handoff: Handoff, number: int) -> None:
        """Wait for the ranks of a failed handoff, whose verdict has this number in their group's log."""
        self._held.setdefault(handoff.room, []).append((number, handoff))

    def let_go(self, handoff: Handoff) -> None:
        """A handoff is quiet, or was never held."""
        held = self._held.get(handoff.room)
        if held is None:
            return
        held[:] = [entry for entry in held if entry[1] is not handoff]
        if not held:
            del self._held[handoff.room]

    def told(self, rank: Rank, item: LegQuiet) -> None:
        """A rank reads its pages of a failed handoff no more."""
        held = self._of(rank.group, item.room)
        drained = [handoff for number, handoff in held if number <= item.after]
        if drained:
            _quieten(drained[-1], rank)
        elif held and held[0][1].machine.attempt == 1:
            _quieten(held[0][1], rank)

    def dead(self, rank: Rank) -> None:
        """Nothing is read any more by a rank whose process has ended."""
        for room in list(self._held):
            for _, handoff in self._of(rank.group, room):
                _quieten(handoff, rank)

    def take_over(self, rank: Rank, left: Unreleased, failure: Failure | None, desk: Desk) -> None:
        """Hold what a former coordinator has not released, as ``rank`` remembers; ``failure``, if known."""
        group = rank.group
        known = (handoff for _, handoff in self._of(group, left.room))
        handoff = next((handoff for handoff in known if handoff.machine.attempt == left.attempt), None)
        if handoff is None:
            handoff = Handoff(left.room, left.attempt, desk)
            handoff.told_before = True
            handoff.prefill = group
            handoff.apply(Paired(Pairing.of_own(group.world_size)))
            failure = failure or FORGOTTEN
            handoff.fail(failure.reason, failure.message, failure.origin)
        if left.quiet:
            _quieten(handoff, rank)

    def _of(self, group: Group, room: int) -> list[tuple[int, Handoff]]:
        return [entry for entry in self._held.get(room, ()) if entry[1].prefill is group]


def _quieten(handoff: Handoff, rank: Rank) -> None:
    """Both ends of a rank's own move are quiet; it may be so already."""
    for side in Role:
        handoff.apply(MoveQuiet(rank.number, side))
