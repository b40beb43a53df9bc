"""Who must agree: the ranks of each engine, what they have heard, and when a group is ready."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

from coordinator.broadcast import GroupLog
from coordinator.messages import EXTERNAL

if TYPE_CHECKING:
    from coordinator.handoff import Handoff
    from coordinator.messages import Hello, Role


class Rank:
    """One life of one rank: a client object in an engine's process.

    Attributes:
        name: ``group/rank``, as failures and logs name it.
        peer: the name of this one life, as workers know it.
        identity: its routing id on the control socket.
        received: its items have arrived up to this number.
        acknowledged: it has every event of its group up to this one.
        applied: its engine has drained every event up to this one.
        listening: it has seen a broadcast.
        alive: it is a member of its group now.
        forgotten: it was lost and silent for so long that nothing is kept for it any more.
        gone: it is proven that its process does not run any more, or that its place is taken.
        joined_at_s: when it came, on the loop's clock; minus infinity for one that a former coordinator knew.
        seen_at_s: its last sign of life, on the loop's clock.
        steady_since_s: since then its signs have come without a break.

    """

    __slots__ = (
        "acknowledged",
        "alive",
        "applied",
        "forgotten",
        "gone",
        "group",
        "hello",
        "identity",
        "joined_at_s",
        "listening",
        "name",
        "number",
        "peer",
        "received",
        "seen_at_s",
        "steady_since_s",
    )

    def __init__(self, group: Group, hello: Hello, identity: bytes, acknowledged: int, now_s: float) -> None:
        """A rank that has just said ``hello``."""
        self.group = group
        self.hello = hello
        self.identity = identity
        self.number = hello.rank
        self.name = f"{group.name}/{hello.rank}"
        self.peer = f"{self.name}#{hello.instance:x}"
        self.received = 0
        self.acknowledged = acknowledged
        self.applied = acknowledged
        self.listening = False
        self.alive = True
        self.gone = False
        self.forgotten = False
        self.joined_at_s = now_s if hello.epoch == 0 else -math.inf
        self.seen_at_s = self.steady_since_s = now_s

    def sign(self, now_s: float, break_s: float) -> None:
        """Note a sign of life; ``break_s`` without one are a break."""
        if now_s - self.seen_at_s > break_s:
            self.steady_since_s = now_s
        self.seen_at_s = now_s

    def has_drained(self, since_s: float, drain_s: float, break_s: float) -> bool:
        """Whether what was on its way to it at ``since_s`` has landed: it has run for ``drain_s`` since.

        What was in the buffers of a process when it was stopped is there still when it goes on, and a
        stop for less than ``break_s`` is not noticed: that much more of signs is asked for.
        """
        return self.seen_at_s - max(since_s, self.steady_since_s) >= drain_s + break_s


class Group:
    """All ranks of one engine that must agree.

    Attributes:
        ranks: by number; None where no rank has joined yet. A lost rank stays until it is replaced.
        incarnation: counted up whenever a member is lost; its handoffs fail with it.
        log: the events of this group.
        absent: the ranks that are not there, or have not seen a broadcast yet, as of ``heard``.
        published: events up to here have been broadcast.
        ended: rooms whose verdict some rank has not drained yet -> the number of that verdict.
        handoffs: the handoffs in flight that this group takes part in.
        origin: the epoch that it was restored from and that epoch's head; (0, 0) when it was not.
        life: how often its engine has given up on a coordinator; see ``Hello``.
        lineage: its identity, which outlives coordinators; see ``Welcome``.
        awaits: rooms of a former epoch of which its ranks have spoken without having been told a
            verdict since -> the last attempt that they know to have ended.
        unproven: rooms of which a former coordinator had heard from its ranks, perhaps, while it is not
            proven that nothing moves any more at its pages on behalf of that one.

    """

    def __init__(self, hello: Hello) -> None:
        """A group as its first rank describes it."""
        self.name: str = hello.group
        self.topic = hello.group.encode() + b"\0"
        self.role: Role = hello.role
        self.world_size: int = hello.world_size
        self.layout = hello.layout
        self.backend: str = hello.backend
        self.ranks: list[Rank | None] = [None] * hello.world_size
        self.incarnation = 1
        self.log: GroupLog = GroupLog()
        self.published = 0
        self.published_at_s = float("-inf")
        self.stable = 0
        self.absent = list(range(hello.world_size))
        self.ended: dict[int, int] = {}
        self.handoffs: set[Handoff] = set()
        self.origin = (0, 0)
        self.life: int = hello.life
        self.lineage = secrets.randbits(64)
        self.awaits: dict[int, int] = {}
        self.unproven: set[int] = set()

    @property
    def moves_itself(self) -> bool:
        """Whether its engine moves the pages by itself, and only tells what became of it."""
        return self.backend == EXTERNAL

    @property
    def live(self) -> list[Rank]:
        """The members that are alive."""
        return [rank for rank in self.ranks if rank is not None and rank.alive]

    @property
    def deserted(self) -> bool:
        """Whether every member that it ever had is gone: nobody hears it any more."""
        return all(rank is None or rank.gone or rank.forgotten for rank in self.ranks)

    def received(self) -> list[int]:
        """For each rank, up to which number its items have arrived."""
        return [0 if rank is None else rank.received for rank in self.ranks]

    def missing(self) -> list[str]:
        """The members that are not there, or have not seen a broadcast yet, by name."""
        return [f"{self.name}/{number}" for number in self._absent()]

    @property
    def ready(self) -> bool:
        """Whether all members have seen a broadcast."""
        return not self.absent

    def _absent(self) -> list[int]:
        return [
            number
            for number, rank in enumerate(self.ranks)
            if rank is None or not rank.alive or not rank.listening
        ]

    def heard(self) -> bool:
        """Bring ``stable`` and ``absent`` up to date and drop what nobody needs; True on a change.

        Stable is what every live member has. What is kept is more: a member that has not joined
        yet, or that was lost but may come back, still gets what it missed.
        """
        live = self.live
        stable = max(self.stable, min((rank.acknowledged for rank in live), default=self.stable))
        absent = self._absent()
        changed = stable != self.stable or absent != self.absent
        self.stable, self.absent = stable, absent
        self.log.trim(
            min(
                (
                    self.log.first - 1 if rank is None else rank.acknowledged
                    for rank in self.ranks
                    if rank is None or not (rank.gone or rank.forgotten)
                ),
                default=self.stable,
            )
        )
        return changed

    def drained(self) -> None:
        """Forget the verdicts that every engine has drained that may still speak of their rooms.

        That includes the engine of a rank that was lost, as long as it may come back.
        """
        kept = self.log.first - 1
        applied = min(
            (
                rank.applied
                for rank in self.ranks
                if rank is not None
                and not (rank.gone or rank.forgotten)
                and (rank.alive or rank.acknowledged >= kept)
            ),
            default=self.log.head,
        )
        while self.ended:
            room = next(iter(self.ended))
            if self.ended[room] > applied:
                return
            del self.ended[room]
