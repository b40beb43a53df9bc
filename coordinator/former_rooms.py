"""The rooms of a former coordinator: which verdict of its counts, and what becomes of the rest.

A room that a rank holds has a verdict already when some rank of its group, or of the other side's,
has received one: that one is adopted. (Which group was the other side, and where in its log it was
told, is part of a verdict: the room may be in use by others by now.) The rest fails with
``coordinator_restarted``: at once when both sides are known, else when ``rank.reattach_s`` is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from coordinator.endings import Ended
from coordinator.events import Inherited
from coordinator.messages import Elsewhere, Outcome, Role
from coordinator.reasons import Reason
from coordinator.watch import Watch

if TYPE_CHECKING:
    from coordinator.config import Config
    from coordinator.former_pages import FormerPages
    from coordinator.groups import Group
    from coordinator.handoff import Handoff
    from coordinator.membership import Membership
    from coordinator.messages import Held
    from coordinator.rooms import Rooms
    from coordinator.testimony import Testimony

#: What ``coordinator_restarted`` says.
LOST: Final = "the coordinator was restarted, and no rank had heard a verdict before that"


class FormerRooms:
    """Sees that no room of the former epoch stays without a verdict."""

    def __init__(self, config: Config, membership: Membership, rooms: Rooms, pages: FormerPages) -> None:
        """Know of none yet."""
        self._membership = membership
        self._rooms = rooms
        self._pages = pages
        # The lineage of a group -> the number of an event that it was told -> which verdict that was.
        self._claims: dict[int, dict[int, tuple[int, Ended]]] = {}
        self._undecided: Watch[Handoff] = Watch(config.rank.reattach_s, self._give_up)

    def close(self) -> None:
        """Stop the clocks."""
        self._undecided.close()

    def remember(self, group: Group, testimony: Testimony) -> None:
        """Learn from what a group remembers which rooms have ended, and how."""
        other = Role.DECODE if group.role is Role.PREFILL else Role.PREFILL
        learned = set()
        for number, event in sorted(testimony.events.items()):
            if not isinstance(event, Outcome):
                continue
            room, attempt = event.room, event.attempt
            group.ended.pop(room, None)
            group.ended[room] = number
            if room in group.awaits:
                group.awaits[room] = max(group.awaits[room], attempt)
            aux = testimony.side_data(number, event)
            ended = Ended(
                attempt, event.failure, None, Elsewhere(group.lineage, number), inherited=True, aux=aux
            )
            self._claim(event, ended, other)
            known = self._rooms.endings.get(room)
            if known is None or known.attempt < attempt:
                self._rooms.endings.remember(room, ended)
                learned.add(room)
            elif known.attempt == attempt and known.unaware is group.role:
                known.unaware = None
        for claimed in list(self._membership.groups.values()):
            if claimed.origin != (0, 0):
                self._adopt_claims(claimed)
        for room in learned & set(self._rooms.active):
            self._correct(room, other)

    def _claim(self, event: Outcome, ended: Ended, other: Role) -> None:
        """Note what a group says another one was told; or, when that was not known, what it was not."""
        elsewhere = event.elsewhere
        if elsewhere is not None:
            self._claims.setdefault(elsewhere.lineage, {})[elsewhere.number] = (event.room, ended)
        elif event.failure is not None:
            ended.unaware = other

    def _adopt_claims(self, group: Group) -> None:
        """Tell a group the verdicts that it waits for, and that other groups say it was told.

        It had not heard them: their numbers are beyond what any of its ranks has. (But those of a
        verdict that was adopted before are beyond it, too: so it must wait for the room, and for this
        attempt. And a number alone means nothing to another engine that has the same name by now.)
        """
        claims = self._claims.pop(group.lineage, {})
        for number in sorted(claims):
            room, ended = claims[number]
            if number > group.origin[1] and group.awaits.get(room, ended.attempt) < ended.attempt:
                self._adopt_claim(group, room, ended)

    def _adopt_claim(self, group: Group, room: int, ended: Ended) -> None:
        handoff = self._rooms.active.get(room)
        if handoff is not None and group in handoff.groups:
            # It stands for what this side had said of the room before it could hear this.
            self._undecided.discard(handoff)
            if len(handoff.groups) > 1:
                # A third party uses the room already; its bytes may be on their way into these pages.
                handoff.machine.attempt = max(handoff.machine.attempt, ended.attempt + 1)
                handoff.fail(Reason.COORDINATOR_RESTARTED, LOST)
                return
            self._rooms.withdraw(handoff, ended.failure)
        self._rooms.adopt(group, room, ended)

    def _correct(self, room: int, unaware: Role) -> None:
        """See to a handoff that has begun before a verdict of the former epoch came to light."""
        known, handoff = self._rooms.endings.get(room), self._rooms.active[room]
        if known is None or handoff.machine.attempt > known.attempt:
            return
        group = handoff.prefill if unaware is Role.PREFILL else handoff.decode
        concerns_it = known.unaware is unaware and group is not None and group.origin != (0, 0)
        if group is not None and concerns_it and len(handoff.groups) == 1:
            # It stands for what that side had said of the room before it could hear this.
            self._undecided.discard(handoff)
            self._rooms.withdraw(handoff, known.failure)
            self._rooms.adopt(group, room, known)
        else:
            # It is a later attempt; nobody has heard its number yet.
            handoff.machine.attempt = known.attempt + 1

    def recall(self, group: Group, held: Held) -> None:
        """See to a room that a rank of ``group`` believes to be in flight."""
        if group.ended.get(held.room, 0) > held.after:
            return  # another rank of the group has heard the verdict: it is replayed
        known = self._rooms.endings.get(held.room)
        if known is not None and known.unaware is group.role and known.attempt > held.attempt:
            self._rooms.adopt(group, held.room, known)
            return
        handoff = self._rooms.active.get(held.room)
        if handoff is None:
            last = max(held.attempt, known.attempt if known is not None else 0)
            handoff = self._rooms.admit(held.room, last + 1)
            handoff.apply(Inherited())
            self._undecided.sign(handoff)
        bound = handoff.prefill if group.role is Role.PREFILL else handoff.decode
        if bound is None:
            self._rooms.bind(handoff, group)
        if handoff not in self._undecided:
            # Somebody has spoken of the room anew; but what this rank had said of it is lost.
            handoff.fail(Reason.COORDINATOR_RESTARTED, LOST)

    def judge(self, handoff: Handoff) -> None:
        """Fail an inherited handoff when both its sides are known: neither can have a verdict."""
        if handoff in self._undecided:
            self._give_up(handoff)

    def _give_up(self, handoff: Handoff) -> None:
        self._undecided.discard(handoff)
        handoff.fail(Reason.COORDINATOR_RESTARTED, LOST)
        self._pages.settle(handoff)
