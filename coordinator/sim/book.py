"""The driver's book: what became of every handoff, on every rank that had a part in it.

A handoff is *settled* when every rank that took part and still lives has reported the outcome and
the release of its pages. What is not settled at the end is unresolved.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.sim.errors import SimulationError
from coordinator.sim.wire import Checkpoint, Completed, Ended, Freed, LastState, Refusal, Started

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coordinator.sim.wire import Report, Reports, Request

#: Sentences of one kind that are kept.
MAX_NOTES = 100


@dataclass(frozen=True, slots=True)
class Party:
    """One incarnation of a group: who takes part in a handoff."""

    group: str
    incarnation: int
    world_size: int

    def __str__(self) -> str:
        """``decode-0 #2``."""
        return f"{self.group} #{self.incarnation}"


@dataclass(slots=True)
class Handoff:
    """One room's way from a prefill to a decode group.

    Attributes:
        request: what was asked for.
        prefill: who sends.
        decode: who receives.
        opened_s: when it was submitted, on the driver's monotonic clock.
        settled_s: when the last rank had reported everything; None before.
        outcome: the reason of its failure, empty for success, None while it is open.
        failure: the failure's sentence.
        started: ranks that have started it, by party.
        complete: prefill ranks that have completed it.
        waiting: (party, rank) that owe the outcome.
        holding: (party, rank) that owe the release.
        untold: a rank was killed that owed its outcome.
        corrupt_pages: over all decode ranks.
        seconds: the longest time from prefill-complete to outcome on a prefill rank; -1 for none.

    """

    request: Request
    prefill: Party
    decode: Party
    opened_s: float
    settled_s: float | None = None
    outcome: str | None = None
    failure: str = ""
    started: Counter[Party] = field(default_factory=Counter)
    complete: int = 0
    waiting: set[tuple[Party, int]] = field(default_factory=set)
    holding: set[tuple[Party, int]] = field(default_factory=set)
    untold: bool = False
    corrupt_pages: int = 0
    seconds: float = -1.0

    @property
    def in_flight(self) -> bool:
        """Whether every rank of both sides has started it, and none has an outcome yet."""
        return (
            self.outcome is None
            and self.started[self.prefill] == self.prefill.world_size
            and self.started[self.decode] == self.decode.world_size
        )

    def missing(self) -> str:
        """Name what is missing."""
        owed = [f"outcome at {party} rank {rank}" for party, rank in sorted(self.waiting, key=str)]
        owed += [f"release at {party} rank {rank}" for party, rank in sorted(self.holding, key=str)]
        return f"room {self.request.room}: {', '.join(owed)}"


class Book:
    """All handoffs of a run, and whether all ranks say the same.

    Attributes:
        settled: in the order in which they were.
        open: by room, in the order in which they were begun.
        disagreements: a sentence for each thing on which ranks differ.
        refusals: a sentence for each thing that the coordinator did not accept from a rank.
        finals: what every rank was left with, by number.

    """

    def __init__(self) -> None:
        """Start empty."""
        self.settled: list[Handoff] = []
        self.open: dict[int, Handoff] = {}
        self.disagreements: list[str] = []
        self.refusals: list[str] = []
        self.finals: dict[Party, dict[int, LastState]] = {}
        self._lost: set[tuple[Party, int]] = set()
        self._checkpoints: dict[tuple[Party, int], dict[int, bytes]] = {}

    def begin(self, request: Request, prefill: Party, decode: Party) -> Handoff:
        """Enter a new handoff.

        Raises:
            SimulationError: the room is not settled yet.

        """
        if request.room in self.open:
            message = f"room {request.room} is still in use; a room can be used again once it is settled"
            raise SimulationError(message)
        handoff = Handoff(request, prefill, decode, time.monotonic())
        for party in (prefill, decode):
            owed = {(party, rank) for rank in range(party.world_size)}
            handoff.waiting |= owed
            handoff.holding |= owed
        self.open[request.room] = handoff
        return handoff

    def record(self, party: Party, reports: Reports) -> None:
        """Enter what a rank reports; what a killed rank had still said does not count."""
        if (party, reports.rank) in self._lost:
            return
        for report in reports.items:
            self._record(party, reports.rank, report)

    def lose(self, party: Party, ranks: Iterable[int]) -> None:
        """Strike out ranks that were killed: they owe nothing any more."""
        gone = {(party, rank) for rank in ranks}
        self._lost |= gone
        for handoff in list(self.open.values()):
            handoff.untold |= bool(handoff.waiting & gone)
            handoff.waiting -= gone
            handoff.holding -= gone
            self._settle(handoff)

    def in_flight(self, decode: Party) -> list[Handoff]:
        """List the handoffs to ``decode`` that all ranks have started and that have no outcome."""
        return [handoff for handoff in self.open.values() if handoff.decode == decode and handoff.in_flight]

    def _record(self, party: Party, rank: int, report: Report) -> None:
        match report:
            case Checkpoint():
                self._compare(party, rank, report.step, report.digest)
            case Refusal():
                self._note(self.refusals, f"{party} rank {rank}, room {report.room}: {report.message}")
            case LastState():
                self.finals.setdefault(party, {})[rank] = report
            case Started() | Completed() | Ended() | Freed():
                handoff = self.open.get(report.room)
                if handoff is None or handoff.request.generation != report.generation:
                    self._disagree(f"{party} rank {rank} reports a handoff that is over: {report}")
                else:
                    self._advance(handoff, party, rank, report)

    def _advance(
        self, handoff: Handoff, party: Party, rank: int, report: Started | Completed | Ended | Freed
    ) -> None:
        match report:
            case Started():
                handoff.started[party] += 1
            case Completed():
                handoff.complete += 1
            case Freed():
                handoff.holding.discard((party, rank))
                self._settle(handoff)
            case Ended():
                self._end(handoff, party, rank, report)
                self._settle(handoff)

    def _end(self, handoff: Handoff, party: Party, rank: int, ended: Ended) -> None:
        where = f"room {handoff.request.room}: {party} rank {rank}"
        if (party, rank) not in handoff.waiting:
            self._disagree(f"{where} had an outcome already, and has {ended.reason or 'success'} now")
            return
        handoff.waiting.discard((party, rank))
        if handoff.outcome is None:
            handoff.outcome, handoff.failure = ended.reason, ended.message
        elif handoff.outcome != ended.reason:
            self._disagree(
                f"{where} has {ended.reason or 'success'}, another rank has {handoff.outcome or 'success'}"
            )
        handoff.corrupt_pages += ended.corrupt_pages
        handoff.seconds = max(handoff.seconds, ended.seconds)

    def _settle(self, handoff: Handoff) -> None:
        if handoff.waiting or handoff.holding or handoff.settled_s is not None:
            return
        handoff.settled_s = time.monotonic()
        del self.open[handoff.request.room]
        self.settled.append(handoff)

    def _compare(self, party: Party, rank: int, step: int, digest: bytes) -> None:
        digests = self._checkpoints.setdefault((party, step), {})
        digests[rank] = digest
        if len(set(digests.values())) > 1:
            self._disagree(f"{party}: ranks {sorted(digests)} are not alike after step {step}")
        if len(digests) == party.world_size:
            del self._checkpoints[party, step]

    def _disagree(self, what: str) -> None:
        self._note(self.disagreements, what)

    @staticmethod
    def _note(notes: list[str], what: str) -> None:
        if len(notes) < MAX_NOTES:
            notes.append(what)
