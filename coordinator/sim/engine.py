"""One rank of a simulated engine: a scheduler that does exactly what each step says.

``apply`` uses nothing but the step, the events that the client drains up to the step's head, and
its own state, which came about in the same way. So all ranks of a group stay alike. Time is only
measured, never decided upon.

A room waits for pages (first come, first served), has an outcome, and gives its pages back once
they are released; an outcome may come at any point of that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from coordinator.messages import Outcome, Released
from coordinator.sim.allocator import PageAllocator
from coordinator.sim.errors import SimulationError
from coordinator.sim.lockstep import RollingDigest
from coordinator.sim.pattern import Pattern
from coordinator.sim.wire import Checkpoint, Ended, Freed, LastState, Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from coordinator.messages import Event, Refused
    from coordinator.reasons import Failure
    from coordinator.sim.pattern import Section
    from coordinator.sim.wire import Report, Request, Step

    Pages = NDArray[np.int32]

#: A digest is reported every so many steps.
CHECKPOINT_STEPS = 32


class Sabotage(StrEnum):
    """A fault built into one rank, to prove that it is found."""

    NONE = ""
    #: Ignore the first release.
    SKIP_RELEASE = "skip_release"
    #: Change one word of the first page that arrives, before it is checked.
    CORRUPT_PAGE = "corrupt_page"
    #: Ignore the first outcome.
    SKIP_OUTCOME = "skip_outcome"


_SKIPPED: dict[Sabotage, type[Event]] = {
    Sabotage.SKIP_RELEASE: Released,
    Sabotage.SKIP_OUTCOME: Outcome,
}


class Client(Protocol):
    """What both roles use of ``coordinator.client``."""

    def drain(self, through: bytes | None = None) -> Sequence[Event]:
        """Return the events up to the head token ``through``."""

    def cancel(self, room: int, why: str = "") -> None:
        """Give a room up."""

    def refusals(self) -> Sequence[Refused]:
        """Return what the coordinator did not accept since the last time."""


def _no_pages() -> Pages:
    return np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Work:
    """What a rank knows of one room.

    Attributes:
        request: what was asked for.
        pages: its pages (int32), none before they were taken.
        sent: prefill: how many of them were sent.
        steps: prefill: how many steps were spent on the chunk that is being computed; decode: how many
            steps the answer still takes.
        complete_s: prefill: when the last was sent, on the monotonic clock.

    """

    request: Request
    pages: Pages = field(default_factory=_no_pages)
    sent: int = 0
    steps: int = 0
    complete_s: float | None = None

    @property
    def owner(self) -> tuple[int, int]:
        """Who holds the pages, for the allocator."""
        return self.request.room, self.request.generation


class Engine(ABC):
    """What both roles have in common."""

    def __init__(self, client: Client, sections: list[Section], sabotage: Sabotage = Sabotage.NONE) -> None:
        """Start without rooms. ``sections`` are the pool, as ``pattern.sections_of`` shows it."""
        self._client = client
        self._sections = sections
        self._allocator = PageAllocator(sections[0].words.shape[1])
        self._pattern = Pattern(sections)
        self._digest = RollingDigest()
        self._sabotage = sabotage
        self._step = 0
        self._rooms: dict[int, Work] = {}
        self._queue: deque[int] = deque()
        self._unreleased: dict[tuple[int, int], Work] = {}
        self._strays = 0
        self._reports: list[Report] = []

    @property
    def busy(self) -> bool:
        """Whether a further step would do something without any news."""
        return False

    def apply(self, step: Step) -> list[Report]:
        """Do what the step says, and tell what happened.

        Raises:
            SimulationError: the step asks for a room that is active.
            CoordinatorError: the client cannot go on.

        """
        self._step = step.number
        applied = [event for event in self._events(step.head) if self._apply(event)]
        for room, why in step.cancels:
            if room in self._rooms:
                self._client.cancel(room, why)
        for request in step.requests:
            self._queue_up(request)
        self._admit()
        self._work()
        self._digest.update(step.number, applied, self._allocator.digest())
        if step.last or step.number % CHECKPOINT_STEPS == 0:
            self._reports += [Refusal(refused.room, refused.message) for refused in self._client.refusals()]
            self._reports.append(Checkpoint(step.number, self._digest.value))
        if step.last:
            self._reports.append(self._final())
        reports, self._reports = self._reports, []
        return reports

    @abstractmethod
    def _announce(self, request: Request) -> None:
        """Tell the coordinator that a room was queued."""

    @abstractmethod
    def _start(self, work: Work) -> None:
        """Begin with a room that has got its pages."""

    @abstractmethod
    def _work(self) -> None:
        """Do a step's worth of computing."""

    @abstractmethod
    def _ended(self, work: Work, outcome: Outcome) -> Ended:
        """Describe a room's end, after checking what can be checked."""

    def _events(self, head: bytes) -> list[Event]:
        events = list(self._client.drain(through=head))
        kind = _SKIPPED.get(self._sabotage)
        skipped = next((event for event in events if type(event) is kind), None)
        if skipped is not None:
            self._sabotage = Sabotage.NONE
            events.remove(skipped)
        return events

    def _queue_up(self, request: Request) -> None:
        if request.room in self._rooms:
            message = f"room {request.room} was submitted again while it is active"
            raise SimulationError(message)
        self._announce(request)
        self._rooms[request.room] = Work(request)
        self._queue.append(request.room)

    def _admit(self) -> None:
        """Give pages to the rooms that wait longest; one that must wait holds up those behind it."""
        while self._queue:
            work = self._rooms.get(self._queue[0])
            if work is not None and not work.pages.size:
                pages = self._allocator.take(work.owner, work.request.pages)
                if pages is None:
                    return
                work.pages = pages
                self._start(work)
            self._queue.popleft()

    def _apply(self, event: Event) -> bool:
        """Apply an event; False when it is about no room of ours.

        A new incarnation may hear the last events of the one before it, each rank from another
        point on. They change nothing here, so they are no part of what the ranks must agree on.
        """
        known = self._end(event) if isinstance(event, Outcome) else self._release(event)
        self._strays += not known
        return known

    def _end(self, outcome: Outcome) -> bool:
        work = self._rooms.pop(outcome.room, None)
        if work is None:
            return False
        self._reports.append(self._ended(work, outcome))
        self._unreleased[outcome.room, outcome.attempt] = work
        return True

    def _release(self, released: Released) -> bool:
        work = self._unreleased.pop((released.room, released.attempt), None)
        if work is None:
            return False
        self._quiet(work)
        return True

    def _quiet(self, work: Work) -> None:
        """Free the pages of a room that nobody else reads or writes any more."""
        if work.pages.size:
            self._allocator.give_back(work.owner)
        self._reports.append(Freed(*work.owner))

    def _final(self) -> LastState:
        held = sorted({*self._rooms, *(room for room, _ in self._unreleased)})
        return LastState(self._allocator.free_pages, held, self._strays)


def sentence(failure: Failure) -> str:
    """Say what happened, and where it came from."""
    return f"{failure.origin}: {failure.message}" if failure.origin else failure.message
