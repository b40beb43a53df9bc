"""The pages of a former coordinator's handoffs: when nothing moves there any more.

The former coordinator's workers died with it (the kernel sees to that), or run in their ranks'
processes. A prefill rank's pages are quiet when its new worker is up, for that one has locked the pool,
or fenced all links of its former life. A decode rank's are quiet when ``reattach_s`` is over, when those
of the prefill ranks are that run their workers themselves, and when it has run for ``drain_s`` after
that. A group's are when all its ranks' are. Engines that move the pages by themselves say it room by
room, see ``own_pages``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from coordinator.events import INHERITED, MoveQuiet
from coordinator.logs import get_logger
from coordinator.messages import Released, Role, Unreleased

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from coordinator.config import Config
    from coordinator.groups import Group, Rank
    from coordinator.handoff import Handoff
    from coordinator.membership import Membership
    from coordinator.messages import Hello
    from coordinator.rooms import Rooms
    from coordinator.transfers import Transfers

#: How often it is looked whether a group's pages are quiet.
LOOK_S: Final = 0.05

_log = get_logger()


class FormerPages:
    """Releases them when they are quiet.

    Attributes:
        lodging: ranks run their workers themselves.
        over_s: until then groups may come back, on the loop's clock.

    """

    def __init__(
        self,
        config: Config,
        membership: Membership,
        rooms: Rooms,
        transfers: Transfers,
        awaited: Callable[[], Iterable[Hello]],
    ) -> None:
        """Hold none yet. ``awaited()`` are the hellos of groups that are not complete."""
        self.lodging = False
        self.over_s = 0.0
        self._config = config
        self._membership = membership
        self._rooms = rooms
        self._transfers = transfers
        self._awaited = awaited
        self._quiet: set[Group] = set()
        self._unreleased: dict[Group, dict[Unreleased, None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def reconfigure(self, config: Config) -> None:
        """Use other bounds from now on."""
        self._config = config

    def close(self) -> None:
        """Wait no more."""
        for task in self._tasks:
            task.cancel()

    def quieten(self, group: Group) -> None:
        """Release a restored group's pages as soon as they are quiet."""
        task = asyncio.get_running_loop().create_task(self._quieten(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hold(self, group: Group, hello: Hello) -> None:
        """Have the rooms wait that a former coordinator had heard of from a rank, unless all is quiet."""
        if group not in self._quiet and hello.memory is not None:
            group.unproven.update(held.room for held in hello.memory.held)

    def owe(self, rank: Rank, unreleased: list[Unreleased], have: int) -> None:
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

    def release(self, group: Group, room: int, attempt: int) -> None:
        """Tell a group that pages are quiet, as soon as nothing of a former epoch moves there."""
        if group.origin == (0, 0) or group in self._quiet:
            self._rooms.tell(group, Released(room, attempt))
        else:
            self._unreleased.setdefault(group, {})[Unreleased(room, attempt)] = None

    def settle(self, handoff: Handoff) -> None:
        """Give back the pages of an inherited handoff, as far as they are quiet."""
        for side, group in ((Role.PREFILL, handoff.prefill), (Role.DECODE, handoff.decode)):
            # A group that the former coordinator did not know has nothing that moved for it.
            if group is None or group.origin == (0, 0) or group in self._quiet:
                handoff.apply(MoveQuiet(INHERITED, side))

    def _is_fenced(self, group: Group) -> bool:
        """Whether no worker that outlives its coordinator, in a rank's process, writes to this group.

        That is so when all prefill groups that have come back are quiet. One that does not come back
        is not known; its workers fence their links by themselves, unless they stand still.
        """
        if not self.lodging or group.role is Role.PREFILL:
            return True
        if any(hello.role is Role.PREFILL for hello in self._awaited()):
            return False
        return all(
            self._is_quiet(other, self.over_s)
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
        """Wait until nothing of the former epoch moves at this group's pages; then release them.

        That is so, too, when its ranks are all gone, whoever of them has never come back.
        """
        # Signs of life and workers come at their own time; a look now and then is enough.
        loop, since_s = asyncio.get_running_loop(), self.over_s
        while not group.deserted:
            if not self._is_fenced(group):
                since_s = max(since_s, loop.time())
            elif self._is_quiet(group, since_s):
                break
            await asyncio.sleep(LOOK_S)
        self._quiet.add(group)
        group.unproven.clear()
        for handoff in list(self._rooms.unreleased):
            if INHERITED in handoff.machine.unsettled and group in handoff.groups:
                self.settle(handoff)
        for attempt in self._unreleased.pop(group, {}):
            self._rooms.tell(group, Released(attempt.room, attempt.attempt))
        _log.info("group.quiet", group=group.name)
