"""Taking over from a coordinator that died, from what its ranks remember. No disk is needed.

A rank that comes from another epoch brings its ``Memory``: its last events, the rooms that it holds,
and what was not released yet. The group's numbering goes on where the rank that has most stands, so
what the others missed is an ordinary replay, and no event is applied twice.

Which verdicts count is the affair of ``former_rooms``, when pages are quiet that of ``former_pages``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from coordinator import acceptance
from coordinator.former_pages import FormerPages
from coordinator.former_rooms import LOST, FormerRooms
from coordinator.logs import get_logger
from coordinator.reasons import Reason
from coordinator.testimony import Testimony, agrees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from coordinator.config import Config
    from coordinator.groups import Group, Rank
    from coordinator.membership import Membership
    from coordinator.messages import Hello, Refused
    from coordinator.rooms import Rooms
    from coordinator.transfers import Transfers

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
    """Restores groups.

    Attributes:
        former: the rooms of the former epoch.
        pages: their pages.

    """

    def __init__(
        self,
        config: Config,
        membership: Membership,
        rooms: Rooms,
        transfers: Transfers,
        answer: Callable[[Hello, bytes, Rank | Refused], None],
    ) -> None:
        """Answer hellos, when their time has come, with ``answer(hello, identity, what)``."""
        self._config = config
        self._membership = membership
        self._rooms = rooms
        self._answer = answer
        self._waiting: dict[str, _Waiting] = {}
        self.pages = FormerPages(config, membership, rooms, transfers, self._awaited)
        self.former = FormerRooms(config, membership, rooms, self.pages)

    def start(self) -> None:
        """Begin the time in which groups may come back."""
        over_s = asyncio.get_running_loop().time() + self._config.rank.reattach_s
        self.pages.over_s = self._membership.gathers_until_s = self._rooms.gathers_until_s = over_s

    def reconfigure(self, config: Config) -> None:
        """Use other bounds from now on."""
        self._config = config
        self.pages.reconfigure(config)

    def close(self) -> None:
        """Stop all clocks."""
        self.former.close()
        for waiting in self._waiting.values():
            waiting.timer.cancel()
        self.pages.close()

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
        if waiting is None and self._membership.is_full(hello.group, self._waiting):
            self._answer(hello, identity, self._membership.refused_full(hello))
            return
        if waiting is None:
            timer = loop.call_later(self._config.rank.reattach_s, self._restore, hello.group)
            waiting = self._waiting[hello.group] = _Waiting(timer)
        waiting.take(hello, identity)
        present = {rank.number for rank in group.live} if group is not None else set()
        if len(present | set(waiting.hellos)) == hello.world_size:
            self._restore(hello.group)

    def _awaited(self) -> Iterator[Hello]:
        """Yield the hellos of groups that are not complete yet."""
        for waiting in self._waiting.values():
            for hello, _ in waiting.hellos.values():
                yield hello

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
        if group is None:
            # Others have come meanwhile.
            for hello, identity in hellos:
                self._answer(hello, identity, self._membership.refused_full(hello))
            return
        group.log.restore(most.acknowledged, testimony.kept)
        group.stable, group.published = max(testimony.least, group.log.first - 1), group.log.head
        group.origin = (most.epoch, most.acknowledged)
        group.lineage, group.awaits = testimony.lineage or group.lineage, dict(testimony.awaits)
        group.unproven = testimony.begun
        self.former.remember(group, testimony)
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
        self._take_all_back(group, hellos, testimony)
        self.pages.quieten(group)

    def _take_all_back(
        self, group: Group, hellos: Iterable[tuple[Hello, bytes]], testimony: Testimony
    ) -> None:
        """Answer those who have waited for the group."""
        for hello, identity in hellos:
            unlike = acceptance.unlike(hello, group)
            if unlike is not None:
                # Another engine, which has the name by now. It asks again, and may replace this one then.
                self._answer(hello, identity, self._membership.refused(hello, "hello", unlike, fatal=False))
            elif hello in testimony.contrary:
                self._refuse(group, hello, identity)
            else:
                self._take_back(group, hello, identity)
        for rank in group.live:
            if rank.hello.memory is None:
                self._rooms.own_pages.dead(rank)  # the process that had its place
            _forget_memory(rank)

    def _come_late(self, group: Group, hello: Hello, identity: bytes) -> None:
        """Take back a rank whose group did not wait for it, if what it has is what the group had."""
        holder = group.ranks[hello.rank]
        contested = self._membership.contest(holder, hello) if holder is not None and holder.alive else None
        if contested is not None:
            self._answer(hello, identity, contested)
            return
        epoch, head = group.origin
        same = hello.epoch == epoch and hello.acknowledged <= head
        known = dict(enumerate(group.log.since(0), group.log.first))
        if same or (hello.acknowledged in known and agrees(hello, known)):
            self._take_back(group, hello, identity)
            taken = group.ranks[hello.rank]
            if taken is not None:
                _forget_memory(taken)
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
            self.pages.hold(group, hello)
            for held in hello.memory.held:
                self.former.recall(group, held)
            self.pages.owe(rank, hello.memory.unreleased, have)


def _goes_on(group: Group) -> bool:
    """Whether the group is one already: it was restored, or all its ranks are new."""
    return group.origin != (0, 0) or len(group.live) == group.world_size


def _forget_memory(rank: Rank) -> None:
    """Let go of what a rank has remembered, up to some MiB, when it has been taken up."""
    if rank.hello.memory is not None:
        rank.hello = msgspec.structs.replace(rank.hello, memory=None)
