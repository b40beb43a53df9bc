"""Engines of the storm: all ranks of one do the same in the same step, up to rank 0's head.

An engine that loses a rank stands still until a new process is ready in its place, which knows none
of the rooms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from coordinator.client.inbox import Head
from coordinator.messages import Cancel, Extend, Offer, Open, Outcome, Role, Send
from tests.service.peers import PAGES, pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.messages import Event
    from tests.faults.chaos.ranks import StormRank

_PAGES_OF_A_RANK: Final = range(PAGES)


@dataclass(frozen=True)
class Use:
    """One use of a room: the same for both sides.

    Attributes:
        steps: how many steps prefill takes for it.
        opens: prefill announces it first.
        cancels: the side and the rank that gives it up, and after how many steps; or None.

    """

    room: int
    generation: int
    pages: int
    steps: int
    opens: bool
    cancels: tuple[Role, int, int] | None

    @property
    def aux(self) -> bytes:
        """What rank 0 sends along."""
        return f"{self.room}.{self.generation}".encode()


@dataclass
class Work:
    """A use of a room in one engine."""

    use: Use
    pages: tuple[int, ...]
    step: int = 0


@dataclass
class Engine:
    """All ranks of one engine.

    Attributes:
        works: rooms without an outcome.
        unreleased: attempts with an outcome, whose pages may not be used yet.
        outcomes: what became of each use, by room and generation.
        waiting: uses that have no pages yet.

    """

    name: str
    role: Role
    world_size: int
    released: Callable[[StormRank, tuple[int, ...]], None]
    ranks: list[StormRank] = field(default_factory=list)
    works: dict[int, Work] = field(default_factory=dict)
    unreleased: dict[tuple[int, int], Work] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    waiting: list[Use] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(_PAGES_OF_A_RANK))

    @property
    def live(self) -> list[StormRank]:
        """The ranks whose process runs."""
        return [rank for rank in self.ranks if rank.alive]

    @property
    def idle(self) -> bool:
        """Whether every use has an outcome, and every page is free."""
        return not (self.works or self.unreleased or self.waiting)

    def submit(self, use: Use) -> None:
        """Begin with a use in a step to come."""
        self.waiting.append(use)

    def step(self) -> None:
        """Make a step on every rank, unless one of them has to be waited for."""
        if not all(rank.alive and rank.ready and not rank.frozen for rank in self.ranks):
            return
        head = Head.unpack(self.ranks[0].conversation.inbox.token)
        behind = [rank for rank in self.ranks if not rank.conversation.inbox.reaches(head)]
        assert all(rank.joining for rank in behind), f"{behind[0].name} is behind the head of rank 0"
        if behind:
            return
        self._apply({rank: rank.drain(head) for rank in self.ranks})
        while self.waiting and len(self.free) >= self.waiting[0].pages:
            use = self.waiting.pop(0)
            taken = tuple(self.free.pop() for _ in range(use.pages))
            self.works[use.room] = Work(use, taken)
        for work in list(self.works.values()):
            self._work(work)
            work.step += 1

    def _apply(self, drained: dict[StormRank, list[Event]]) -> None:
        """Do what the events say; every rank has drained the same.

        One that joins may hear less, or some that were before its time and are about nothing it knows.
        """
        newcomers = [rank for rank, events in drained.items() if len(rank.applied) == len(events)]
        others = [events for rank, events in drained.items() if rank not in newcomers]
        for events in others:
            assert events == others[0], f"the ranks of {self.name} differ in one step"
        for event in others[0] if others else max(drained.values(), key=len):
            if isinstance(event, Outcome):
                work = self.works.pop(event.room, None)
                if work is not None:
                    self.unreleased[event.room, event.attempt] = work
                    self.outcomes[event.room, work.use.generation] = event
                continue
            held = self.unreleased.pop((event.room, event.attempt), None)
            if held is not None:
                for rank in drained:
                    self.released(rank, held.pages)
                self.free += held.pages

    def _work(self, work: Work) -> None:
        use, step = work.use, work.step
        for rank in self.ranks:
            after = rank.conversation.inbox.drained
            if self.role is Role.PREFILL:
                self._prefill(rank, work, after)
            elif step == 0:
                rank.say(Offer(use.room, after, pages(*work.pages)))
            elif step == use.steps + 1:
                rank.say(Extend(use.room, after))
            if use.cancels == (self.role, rank.hello.rank, step):
                rank.say(Cancel(use.room, after, "as the storm says"))

    def _prefill(self, rank: StormRank, work: Work, after: int) -> None:
        use, step = work.use, work.step
        if step == 0 and use.opens:
            rank.say(Open(use.room, after))
        if step >= use.steps:
            return
        first, behind = (use.pages * at // use.steps for at in (step, step + 1))
        last = step == use.steps - 1
        aux = use.aux if last and not rank.hello.rank else b""
        rank.say(Send(use.room, after, pages(*work.pages[first:behind]), last, aux))
