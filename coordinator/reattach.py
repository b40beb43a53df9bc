"""Taking over from a coordinator that died, from what its ranks remember. No disk is needed.

A rank that comes from another epoch brings its ``Memory``: its last events, the rooms that it holds,
and what was not released yet. The group's numbering goes on where the rank that has most stands, so
what the others missed is an ordinary replay, and no event is applied twice.

A room that a rank holds has a verdict already when some rank of its group, or of the other side's,
has received one: that one is adopted. (Which group was the other side, and where in its log it was
told, is part of a verdict: the room may be in use by others by now.) The rest fails with
``coordinator_restarted``: at once when both sides are known, else when ``rank.reattach_s`` is over.

Pages: the former coordinator's workers died with it (the kernel sees to that), or run in their ranks'
processes. A prefill rank's pages are quiet when its new worker is up, for that one has locked the pool,
or fenced all links of its former life. A decode rank's are quiet when ``reattach_s`` is over, when those
of the prefill ranks are that run their workers themselves, and when it has run for ``drain_s`` after
that. A group's are when all its ranks' are.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from coordinator.endings import Ended
from coordinator.events import INHERITED, Inherited, MoveQuiet
from coordinator.logs import get_logger
from coordinator.messages import Elsewhere, Hello, Outcome, Refused, Released, Role, Unreleased
from coordinator.reasons import Reason
from coordinator.testimony import Testimony, agrees
from coordinator.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.config import Config
    from coordinator.groups import Group, Rank
    from coordinator.handoff import Handoff
    from coordinator.membership import Membership
    from coordinator.messages import Held
    from coordinator.rooms import Rooms
    from coordinator.transfers import Transfers

#: How often it is looked whether a group's pages are quiet.
LOOK_S: Final = 0.05
#: What ``coordinator_restarted`` says.
LOST: Final = "the coordinator was restarted, and no rank had heard a verdict before that"

_log = get_logger()


class _Waiting:
    """The hellos of a group that is not complete yet, by rank."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.hellos: dict[int, tuple[Hello, bytes]] = {}
        self.memories: dict[int, Hello] = {}
        self.timer = timer

    def take(self, hello: Hello, identity: bytes) -> None:
        """Note a hello. What is remembered stays known, also when a new process takes the place."""
        self.hellos[hello.rank] = (hello, identity)
        if hello.memory is not None:
            self.memories[hello.instance] = hello


class Reattach:
    """Restores groups, and sees that no room of the former epoch stays without a verdict."""

    def __init__(
        self,
        config: Config,
        membership: Membership,
        rooms: Rooms,
        transfers: Transfers,
        answer: Callable[[Hello, bytes, Rank | Refused], None],
    ) -> None:
        """Answer hellos, when their time has come, with ``answer(hello, identity, what)``."""
        #: Ranks run their workers themselves.
        self.lodging = False
        self._config = config
        self._membership = membership
        self._rooms = rooms
        self._transfers = transfers
        self._answer = answer
        self._waiting: dict[str, _Waiting] = {}
        # The lineage of a group -> the number of an event that it was told -> which verdict that was.
        self._claims: dict[int, dict[int, tuple[int, Ended]]] = {}
        self._quiet: set[Group] = set()
        self._unreleased: dict[Group, dict[Unreleased, None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over_s = 0.0
        self._undecided: Watch[Handoff] = Watch(config.rank.reattach_s, self._give_up)

    def start(self) -> None:
        """Begin the time in which groups may come back."""
        self._over_s = asyncio.get_running_loop().time() + self._config.rank.reattach_s
        self._membership.gathers_until_s = self._rooms.gathers_until_s = self._over_s

    def reconfigure(self, config: Config) -> None:
        """Use other bounds from now on."""
        self._config = config

    def close(self) -> None:
        """Stop all clocks."""
        self._undecided.close()
        for waiting in self._waiting.values():
            waiting.timer.cancel()
        for task in self._tasks:
            task.cancel()

    def awaits(self, hello: Hello) -> bool:
        """Whether the hello's group is being restored, so that it must wait with the others."""
        return hello.group in self._waiting

    def forsake(self, name: str, life: int) -> int:
        """Wait no more for a group's ranks in a life before ``life``; returns for which it is waited."""
        waiting = self._waiting.get(name)
        if waiting is None:
            return 0
        awaited = max(hello.life for hello, _ in waiting.hellos.values())
        if awaited < life:
            waiting.timer.cancel()
            del self._waiting[name]
        return awaited

    def hello(self, hello: Hello, identity: bytes) -> None:
        """Take the hello of a rank of another epoch, or of a new rank of such a group."""
        problem = self._membership.unusable(hello)
        if problem is not None:
            self._answer(hello, identity, self._membership.refused(hello, "hello", problem, fatal=True))
            return
        group = self._membership.groups.get(hello.group)
        holder = group.ranks[hello.rank] if group is not None else None
        if holder is not None and holder.hello.instance == hello.instance:
            # It said hello once more before it heard the answer to the first one.
            self._answer(hello, identity, self._membership.hello(hello, identity, 0))
            return
        if group is not None and hello.memory is not None and _goes_on(group):
            self._come_late(group, hello, identity)
            return
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(hello.group)
        if waiting is None:
            timer = loop.call_later(self._config.rank.reattach_s, self._restore, hello.group)
            waiting = self._waiting[hello.group] = _Waiting(timer)
        waiting.take(hello, identity)
        present = {rank.number for rank in group.live} if group is not None else set()
        if len(present | set(waiting.hellos)) == hello.world_size:
            self._restore(hello.group)

    # Restoring a group

    def _restore(self, name: str) -> None:
        waiting = self._waiting.pop(name)
        waiting.timer.cancel()
        hellos = list(waiting.hellos.values())
        testimony = Testimony(waiting.memories.values())
        most = testimony.most
        early = self._membership.groups.get(name)
        newcomers = [rank for rank in early.ranks if rank is not None] if early is not None else []
        if newcomers and (most.acknowledged or any(rank.received for rank in newcomers)):
            # They were here before the past of their group was, and join anew.
            for rank in newcomers:
                self._membership.lose(rank, Reason.COORDINATOR_RESTARTED, LOST, gone=True)
            newcomers.clear()
        group = self._membership.found(most)
        assert group is not None  # noqa: S101 - there was room
        group.log.restore(most.acknowledged, testimony.kept)
        group.stable, group.published = max(testimony.least, group.log.first - 1), group.log.head
        group.origin = (most.epoch, most.acknowledged)
        group.lineage, group.awaits = testimony.lineage or group.lineage, dict(testimony.awaits)
        group.unproven = testimony.begun
        self._remember(group, testimony)
        _log.warning(
            "group.restored",
            group=name,
            head=group.log.head,
            replayed=group.log.head - group.stable,
            ranks=len(hellos),
            held=testimony.held,
        )
        for rank in newcomers:
            self._answer(rank.hello, rank.identity, rank)  # it learns whose past it shares
        for hello, identity in hellos:
            if hello in testimony.contrary:
                self._refuse(group, hello, identity)
            else:
                self._take_back(group, hello, identity)
        for rank in group.live:
            if rank.hello.memory is None:
                self._rooms.own_pages.dead(rank)  # the process that had its place
        task = asyncio.get_running_loop().create_task(self._quieten(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _come_late(self, group: Group, hello: Hello, identity: bytes) -> None:
        """Take back a rank whose group did not wait for it, if what it has is what the group had."""
        epoch, head = group.origin
        same = hello.epoch == epoch and hello.acknowledged <= head
        known = dict(enumerate(group.log.since(0), group.log.first))
        if same or (hello.acknowledged in known and agrees(hello, known)):
            self._take_back(group, hello, identity)
        else:
            self._refuse(group, hello, identity)

    def _refuse(self, group: Group, hello: Hello, identity: bytes) -> None:
        message = (
            f"{group.name} went on without this rank after the coordinator's restart, and what it has "
            "does not fit any more; restart it"
        )
        self._answer(hello, identity, self._membership.refused(hello, "late", message, fatal=True))

    def _take_back(self, group: Group, hello: Hello, identity: bytes) -> None:
        have = group.stable if hello.memory is None else hello.acknowledged
        if have < group.log.first - 1:
            message = (
                f"events {have + 1} to {group.log.first - 1} are not known to any rank any more; restart it"
            )
            self._answer(hello, identity, self._membership.refused(hello, "behind", message, fatal=True))
            return
        rank = self._membership.place(group, hello, identity, have)
        self._answer(hello, identity, rank)
        if hello.memory is not None:
            if group not in self._quiet:
                group.unproven.update(held.room for held in hello.memory.held)
            for held in hello.memory.held:
                self._recall(group, held)
            self._owe(rank, hello.memory.unreleased, have)

    def _owe(self, rank: Rank, unreleased: list[Unreleased], have: int) -> None:
        """Release these attempts later, but for those whose release a rank that has ``have`` is told now."""
        group = rank.group
        told = {(event.room, event.attempt) for event in group.log.since(have) if isinstance(event, Released)}
        for left in unreleased:
            if (left.room, left.attempt) in told:
                continue
            ended = self._rooms.endings.get(left.room)
            known = ended if ended is not None and ended.attempt == left.attempt else None
            if group.moves_itself and (known is None or known.failure is not None):
                failure = None if known is None else known.failure
                self._rooms.own_pages.take_over(rank, left, failure, self._rooms)
            else:
                self._unreleased.setdefault(group, {})[Unreleased(left.room, left.attempt)] = None

    def _remember(self, group: Group, testimony: Testimony) -> None:
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

    # Rooms of the former epoch

    def _recall(self, group: Group, held: Held) -> None:
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

    def release(self, group: Group, room: int, attempt: int) -> None:
        """Tell a group that pages are quiet, as soon as nothing of a former epoch moves there."""
        if group.origin == (0, 0) or group in self._quiet:
            self._rooms.tell(group, Released(room, attempt))
        else:
            self._unreleased.setdefault(group, {})[Unreleased(room, attempt)] = None

    def _give_up(self, handoff: Handoff) -> None:
        self._undecided.discard(handoff)
        handoff.fail(Reason.COORDINATOR_RESTARTED, LOST)
        self._settle(handoff)

    # Their pages

    def _settle(self, handoff: Handoff) -> None:
        """Give back the pages of an inherited handoff, as far as they are quiet."""
        for side, group in ((Role.PREFILL, handoff.prefill), (Role.DECODE, handoff.decode)):
            if group is None or group in self._quiet:
                handoff.apply(MoveQuiet(INHERITED, side))

    def _is_fenced(self, group: Group) -> bool:
        """Whether no worker that outlives its coordinator, in a rank's process, writes to this group.

        That is so when all prefill groups that have come back are quiet. One that does not come back
        is not known; its workers fence their links by themselves, unless they stand still.
        """
        if not self.lodging or group.role is Role.PREFILL:
            return True
        awaited = (hello for waiting in self._waiting.values() for hello, _ in waiting.hellos.values())
        if any(hello.role is Role.PREFILL for hello in awaited):
            return False
        return all(
            self._is_quiet(other, self._over_s)
            for other in self._membership.groups.values()
            if other.role is Role.PREFILL and other.origin != (0, 0)
        )

    def _is_quiet(self, group: Group, since_s: float) -> bool:
        if group.moves_itself:
            return True  # Nobody moves anything there but the engine itself, which goes on.
        # Also ranks that were lost, or have not come yet: such a one may have been stopped all the time,
        # and goes on with what is in its buffers.
        return all(
            rank is not None and (rank.gone or self._is_quiet_at(rank, since_s)) for rank in group.ranks
        )

    def _is_quiet_at(self, rank: Rank, since_s: float) -> bool:
        if rank.group.role is Role.PREFILL:
            return self._transfers.is_up(rank)
        return rank.has_drained(since_s, self._config.release.drain_s, self._config.rank.break_s)

    async def _quieten(self, group: Group) -> None:
        """Wait until nothing of the former epoch moves at this group's pages; then release them."""
        # Signs of life and workers come at their own time; a look now and then is enough.
        loop, since_s = asyncio.get_running_loop(), self._over_s
        while not (fenced := self._is_fenced(group)) or not self._is_quiet(group, since_s):
            if not fenced:
                since_s = max(since_s, loop.time())
            await asyncio.sleep(LOOK_S)
        self._quiet.add(group)
        group.unproven.clear()
        for handoff in list(self._rooms.unreleased):
            if INHERITED in handoff.machine.unsettled and group in handoff.groups:
                self._settle(handoff)
        for attempt in self._unreleased.pop(group, {}):
            self._rooms.tell(group, Released(attempt.room, attempt.attempt))
        _log.info("group.quiet", group=group.name)


def _goes_on(group: Group) -> bool:
    """Whether the group is one already: it was restored, or all its ranks are new."""
    return group.origin != (0, 0) or len(group.live) == group.world_size
