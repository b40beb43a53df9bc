"""Ranks join, are watched, and are lost.

A rank is known by its place (group and number) and its ``instance``, drawn once per client object.
The same instance may say hello again at any time. Another one gets the place only when the holder is
dead, or silent while its place is contested: a live rank is never pushed out by a newcomer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from coordinator import acceptance
from coordinator.deaths import Deaths
from coordinator.groups import Group, Rank
from coordinator.logs import get_logger
from coordinator.messages import Hello, Refused, Role
from coordinator.reasons import Reason
from coordinator.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coordinator.config import Config
    from coordinator.metrics import Counters

#: The holder of a contested place has this many heartbeats to show that it is alive.
CONTEST_HEARTBEATS: Final = 3

#: A lost rank that is not heard of for this long is not waited for any more (case C16).
FORGET_AFTER_S: Final = 600.0

_log = get_logger()


class MembershipEvents(Protocol):
    """Who acts on what happens to ranks."""

    def joined(self, rank: Rank) -> None:
        """A rank has taken its place (or come back to it)."""

    def lost(self, rank: Rank, reason: Reason, message: str) -> None:
        """A member is lost; its group's handoffs must fail."""

    def gone(self, rank: Rank) -> None:
        """A lost rank is proven to touch nothing any more."""

    def died(self, rank: Rank) -> None:
        """The process of a rank has ended, perhaps of one that was gone before."""

    def forgotten(self, rank: Rank) -> None:
        """A lost rank was not heard of for so long that nothing is kept ready for it any more."""

    def moved(self, rank: Rank) -> None:
        """A member has another endpoint, and the former one is gone."""


class Membership:
    """All groups and their ranks.

    Attributes:
        groups: by name.
        gathers_until_s: until then the ranks of a former coordinator may be on their way back.

    """

    def __init__(self, config: Config, counters: Counters, events: MembershipEvents) -> None:
        """Start with no group."""
        self.groups: dict[str, Group] = {}
        self.gathers_until_s = 0.0
        self._config = config
        self._counters = counters
        self._events = events
        self._silence: Watch[Rank] = Watch(config.rank.lost_after_s, self._silent)
        self._lost: Watch[Rank] = Watch(FORGET_AFTER_S, self._forget)
        self._contests: dict[Rank, tuple[int, float]] = {}
        self._overflows: dict[Group, tuple[int, float]] = {}
        self._deaths = Deaths(self._died)

    def hello(self, hello: Hello, identity: bytes, epoch: int) -> Rank | Refused:
        """Give a rank its place, or say why it cannot have it."""
        problem = self.unusable(hello) or self._outlived(hello, epoch)
        if problem is not None:
            return self.refused(hello, "hello", problem, fatal=True)
        problem = acceptance.incompatible(hello, self.groups)
        if problem is not None:
            # While ranks are still coming back to a new coordinator, one that fits may be among them.
            gathering = asyncio.get_running_loop().time() < self.gathers_until_s
            return self.refused(hello, "hello", problem, fatal=not gathering)
        group = self.found(hello)
        if group is None:
            return self.refused_full(hello)
        holder = group.ranks[hello.rank]
        # One that is gone cannot return: this hello was on the way when its process died.
        if holder is not None and holder.hello.instance == hello.instance and not holder.gone:
            return self._returned(holder, hello, identity, epoch)
        if holder is not None and holder.alive:
            refusal = self.contest(holder, hello)
            if refusal is not None:
                return refusal
        # A late joiner gets everything that was kept for it; who takes a place, what is not common yet.
        joins_late = holder is None and group.origin == (0, 0)
        have = group.log.first - 1 if joins_late else group.stable
        return self.place(group, hello, identity, have)

    def found(self, hello: Hello) -> Group | None:
        """The hello's group, which is made when there is none; None when there are too many."""
        group = self.groups.get(hello.group)
        if group is None and not self.is_full(hello.group, ()):
            group = self.groups[hello.group] = Group(hello)
        return group

    def is_full(self, name: str, awaited: Iterable[str]) -> bool:
        """Whether there is no room for group ``name`` beside those that are here, or ``awaited``."""
        return len({*self.groups, *awaited} - {name}) >= self._config.limits.max_groups

    def sign(self, rank: Rank) -> None:
        """Note a sign of life."""
        rank.sign(asyncio.get_running_loop().time(), self._config.rank.break_s)
        self._silence.sign(rank)

    def lose(self, rank: Rank, reason: Reason, message: str, *, gone: bool, left: bool = False) -> None:
        """A member is lost; with ``gone`` it is proven that its process does not run any more.

        One that ``left`` in good order is no loss to be warned of, but its handoffs fail as well.
        """
        if rank.alive:
            rank.alive = False
            self._silence.discard(rank)
            self._lost.sign(rank)
            self._contests.pop(rank, None)
            rank.group.incarnation += 1
            self._counters.ranks_lost += 1
            if left:
                _log.info("rank.left", rank=rank.name, message=message)
            else:
                _log.warning(
                    "rank.lost", rank=rank.name, reason=reason.value, error=message, proven_dead=gone
                )
            self._events.lost(rank, reason, message)
        if gone and not rank.gone:
            rank.gone = True
            self._lost.discard(rank)
            if rank.group.role is Role.DECODE or self._config.backend.hosting != "rank":
                # Else what runs in its process is still to be waited for; see ``unwatch``.
                self._deaths.unwatch(rank)
            rank.group.drained()
            self._events.gone(rank)
            self._drop_if_empty(rank.group)

    def unwatch(self, rank: Rank) -> None:
        """Nothing of a rank's is to be waited for any more."""
        if rank.gone:
            self._deaths.unwatch(rank)

    def confirm_alive(self, rank: Rank) -> bool:
        """Look at once whether a rank's process still runs; one that does not is lost on the spot."""
        if self._deaths.is_over(rank):
            self._died(rank)
        elif self._deaths.is_ending(rank):
            pid = rank.hello.process.pid
            self.lose(rank, _loss(rank), f"the process of {rank.name} (pid {pid}) is dying", gone=False)
        return rank.alive

    def lag(self, group: Group) -> None:
        """Bound a group's log: lose the members that hold up ``limits.backlog_events`` for too long.

        All that is in flight may fail in one instant: a rank is no laggard before it could hear of it.
        """
        bound = self._config.limits.backlog_events
        behind = group.log.head - bound
        laggards = [rank for rank in group.live if rank.acknowledged < behind]
        now_s = asyncio.get_running_loop().time()
        mark, since_s = self._overflows.setdefault(group, (group.log.head, now_s))
        if not laggards:
            del self._overflows[group]
        elif now_s - since_s >= self._config.rank.lost_after_s:
            del self._overflows[group]
            for rank in laggards:
                if rank.acknowledged < mark:
                    self.lose(rank, _loss(rank), f"{rank.name} is {bound} events behind", gone=False)
        group.log.trim(min([behind, *(rank.acknowledged for rank in group.live)]))

    def reconfigure(self, config: Config) -> None:
        """Use other bounds and limits from now on, also for the ranks that are here."""
        self._config = config
        self._silence.rebound(config.rank.lost_after_s)

    def close(self) -> None:
        """Stop watching."""
        self._silence.close()
        self._lost.close()
        self._deaths.close()

    # Taking a place

    def place(self, group: Group, hello: Hello, identity: bytes, have: int) -> Rank:
        """Give a rank its place, whoever held it; it has its group's events up to ``have``."""
        holder = group.ranks[hello.rank]
        if holder is not None:
            self.lose(holder, restart_reason(holder), "its place was taken by a new process", gone=True)
            self.groups[group.name] = group
        # A rank that was lost just after it had acknowledged let the log be trimmed beyond what was stable.
        have = max(have, group.log.first - 1)
        rank = Rank(group, hello, identity, have, asyncio.get_running_loop().time())
        group.ranks[hello.rank] = rank
        if hello.memory is not None:
            rank.applied = 0  # until it tells
        rank.received = hello.confirmed
        self._silence.sign(rank)
        self._deaths.watch(rank)
        _log.info(
            "rank.joined", rank=rank.name, role=group.role.value, world_size=group.world_size,
            pid=hello.process.pid, instance=f"{hello.instance:x}", missing=group.missing(),
        )  # fmt: skip
        self._events.joined(rank)
        return rank

    def _returned(self, rank: Rank, hello: Hello, identity: bytes, epoch: int) -> Rank | Refused:
        """Take back a rank that reconnected, fell behind, or was silent for too long."""
        if hello.epoch == epoch:
            rank.acknowledged = max(rank.acknowledged, min(hello.acknowledged, rank.group.log.head))
        if rank.acknowledged < rank.group.log.first - 1:
            message = f"{rank.name} missed events that are not kept any more; restart it"
            return self.refused(hello, "behind", message, fatal=True)
        rank.identity = identity
        if hello.endpoint != rank.hello.endpoint:
            rank.hello = msgspec.structs.replace(rank.hello, endpoint=hello.endpoint)
            _log.info("rank.moved", rank=rank.name)
            self._events.moved(rank)
        if rank.alive:
            self.sign(rank)
            return rank
        rank.alive = True
        rank.forgotten = False
        self._lost.discard(rank)
        rank.hello = hello
        self._counters.ranks_returned += 1
        self.sign(rank)
        _log.info("rank.returned", rank=rank.name)
        self._events.joined(rank)
        return rank

    def contest(self, holder: Rank, hello: Hello) -> Refused | None:
        """Find out who lives: None when the holder is dead or silent, else what to answer."""
        if not self.confirm_alive(holder):
            return None
        now_s = asyncio.get_running_loop().time()
        heartbeat_s = self._config.rank.heartbeat_s
        instance, since_s = self._contests.get(holder, (hello.instance, now_s))
        if instance != hello.instance:
            since_s = now_s
        self._contests[holder] = (hello.instance, since_s)
        # Frames of a dead holder may still be in the queue; a heartbeat later there are none.
        if holder.seen_at_s > since_s + heartbeat_s:
            del self._contests[holder]
            message = (
                f"rank {holder.number} of {holder.group.name} is taken by pid {holder.hello.process.pid}, "
                "which is alive; is the same rank started twice, or do two engines share a group name?"
            )
            return self.refused(hello, "taken", message, fatal=True)
        if now_s - since_s >= CONTEST_HEARTBEATS * heartbeat_s:
            return None
        message = (
            f"rank {holder.number} of {holder.group.name} is taken; finding out whether its holder lives"
        )
        return Refused("contested", message)

    def unusable(self, hello: Hello) -> str | None:
        """Say in one sentence why this hello can never be accepted as things are."""
        backend = self._config.backend
        return (
            acceptance.malformed(hello, backend.name)
            or acceptance.unmappable(hello, backend.hosting)
            or self._unlike(hello)
        )

    def _unlike(self, hello: Hello) -> str | None:
        """Compare with the group's other members."""
        group = self.groups.get(hello.group)
        if group is None:
            return None
        problem = acceptance.unlike(hello, group)
        if problem is None:
            return None
        if not any(self.confirm_alive(rank) for rank in group.live):
            # Nobody is left of the former engine: this is a new one under the old name.
            for rank in group.ranks:
                if rank is not None:
                    self.lose(rank, restart_reason(rank), "replaced by another engine", gone=True)
            self.groups.pop(group.name, None)
            return None
        return problem

    def _outlived(self, hello: Hello, epoch: int) -> str | None:
        """Find a rank that has been here, and was taken for dead or not waited for any longer.

        What it has heard, and what it holds, is of no member that we know; unless that is nothing.
        """
        if hello.epoch != epoch or not (hello.acknowledged or hello.confirmed):
            return None
        group = self.groups.get(hello.group)
        holder = group.ranks[hello.rank] if group is not None else None
        if holder is not None and holder.hello.instance == hello.instance:
            return None
        return f"{hello.group}/{hello.rank} was taken for dead, and its place was given up; restart it"

    def refused(self, hello: Hello, code: str, message: str, *, fatal: bool) -> Refused:
        """Count and log that a rank cannot have its place; returns what to tell it."""
        self._counters.refused[code] += 1
        _log.warning("rank.refused", rank=f"{hello.group}/{hello.rank}", pid=hello.process.pid, error=message)
        return Refused(code, message, fatal=fatal)

    def refused_full(self, hello: Hello) -> Refused:
        """Refuse a rank because there are too many groups."""
        bound = f"limits.max_groups = {self._config.limits.max_groups} groups are registered"
        return self.refused(hello, "full", bound, fatal=False)

    # Being lost

    def _died(self, rank: Rank) -> None:
        self._deaths.unwatch(rank)
        self.lose(
            rank, _loss(rank), f"the process of {rank.name} (pid {rank.hello.process.pid}) died", gone=True
        )
        self._events.died(rank)

    def _silent(self, rank: Rank) -> None:
        message = f"{rank.name} gave no sign of life for {self._silence.bound_s:g} s"
        self.lose(rank, _loss(rank), message, gone=False)

    def _forget(self, rank: Rank) -> None:
        """Free what is kept for a rank that did not come back. Pages held for it stay held."""
        rank.forgotten = True
        _log.info("rank.forgotten", rank=rank.name, silent_s=round(FORGET_AFTER_S))
        rank.group.heard()
        rank.group.drained()
        self._events.forgotten(rank)
        self._drop_if_empty(rank.group)

    def _drop_if_empty(self, group: Group) -> None:
        if group.deserted and self.groups.get(group.name) is group:
            del self.groups[group.name]
            self._overflows.pop(group, None)


def _loss(rank: Rank) -> Reason:
    return Reason.RANK_LOST if rank.group.role is Role.PREFILL else Reason.PEER_LOST


def restart_reason(rank: Rank) -> Reason:
    """Why the handoffs of a rank fail whose place is taken."""
    return Reason.RANK_LOST if rank.group.role is Role.PREFILL else Reason.PEER_RESTARTED
