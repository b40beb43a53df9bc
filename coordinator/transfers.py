"""Moves on their way: which worker writes to which decode rank, and what has become of it.

A *flight* is one move handed to a worker, on one of its routes (``coordinator.routes``). Reports come in,
events go to the handoffs' machines.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from coordinator.events import Moved, MoveFailed, MoveQuiet, StartMove
from coordinator.messages import (
    PAGE_BYTES,
    Connected,
    ConnectFailed,
    Fenced,
    Move,
    MoveDone,
    MoveSettled,
    Progress,
    Report,
    Revoke,
    Role,
)
from coordinator.messages import MoveFailed as MoveFailedReport
from coordinator.reasons import Failure, Reason
from coordinator.routes import Crew, Route, Routes, RouteState
from coordinator.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from coordinator.config import Config
    from coordinator.groups import Rank
    from coordinator.handoff import Handoff
    from coordinator.metrics import Counters
    from coordinator.worker.supervisor import Worker

_REASONS: Final = {
    "connect": Reason.CONNECT,
    "disconnected": Reason.TRANSPORT,
    "transport": Reason.TRANSPORT,
    "revoked": Reason.TRANSPORT,
}


class Flight:
    """One move in the hands of a worker.

    ``started`` is whether anything of it may have been posted; ``settled`` is whether the source is
    quiet; ``ended`` whether the worker reported its end.
    """

    __slots__ = ("ended", "handoff", "move", "number", "route", "settled", "size_bytes")

    def __init__(self, number: int, handoff: Handoff, move: int, route: Route, size_bytes: int) -> None:
        """A move of ``size_bytes`` that was just handed over."""
        self.size_bytes = size_bytes
        self.number = number
        self.handoff = handoff
        self.move = move
        self.route = route
        self.ended = False
        self.settled = False


class Quieting(Protocol):
    """Who sees to it that failed flights become quiet (``coordinator.release``)."""

    def settled(self, flight: Flight, *, started: bool) -> None:
        """The source of a failed flight is quiet; its destination may not be."""

    def changed(self, handoff: Handoff) -> None:
        """One of the handoff's flights is over."""

    def fenced(self, route: Route, error: str) -> None:
        """A fence was answered."""


class Transfers:
    """All flights, and the routes that they take. Owned by the service; every call is on the event loop.

    Attributes:
        routes: the ways to decode ranks.
        crews: those who move, by their prefill ranks.
        flights: all that is in the hands of workers, by number.
        quieting: who makes failed flights quiet.
        confirm_alive: asks whether a rank's process still runs.

    """

    def __init__(self, config: Config, send: Callable[[list[bytes]], bool], counters: Counters) -> None:
        """``send`` puts a message on the control socket."""
        self.routes = Routes(config, counters, self)
        self.crews = self.routes.crews
        self.flights: dict[int, Flight] = {}
        self.quieting: Quieting
        self.confirm_alive: Callable[[Rank], bool]
        self._send = send
        self._numbers = count(1)
        self._stalls: Watch[int] = Watch(config.handoff.stall_s, self._stalled)

    # Workers come and go

    def enlist(self, worker: Worker) -> Crew:
        """Take a worker on."""
        crew = self.crews[worker.rank] = Crew(worker, self._send)
        return crew

    def is_up(self, rank: Rank) -> bool:
        """Whether a prefill rank has a worker that runs."""
        crew = self.crews.get(rank)
        return crew is not None and crew.worker.identity is not None

    def worker_up(self, worker: Worker) -> None:
        """Connect a worker's new life to everything it has routes to, and hand over what waited."""
        crew = self.crews[worker.rank]
        waiting = [command for command in crew.commands.clear() if isinstance(command, Move)]
        self.routes.worker_up(crew)
        for command in waiting:
            crew.commands.put(command)
        crew.commands.flush()

    def worker_down(self, worker: Worker, cause: str) -> None:
        """Fail what a dead worker had: its source is quiet now."""
        crew = self.crews.get(worker.rank)
        if crew is None:
            return
        unsent = {command.move for command in crew.commands.clear() if isinstance(command, Move)}
        self.routes.worker_down(crew)
        failure = Failure(Reason.TRANSPORT, worker.rank.name, f"the {worker.name} died: {cause}")
        # All of them: those to decode ranks that are gone have no route in the crew any more.
        for flight in [flight for flight in self.flights.values() if flight.route.crew is crew]:
            self._flight_failed(flight, failure, settled=True, started=flight.number not in unsent)

    def moves(self, rank: Rank) -> bool:
        """Whether a prefill rank's worker may still move something."""
        return any(flight.route.crew.worker.rank is rank for flight in self.flights.values())

    def dismiss(self, rank: Rank) -> None:
        """Forget a worker that has ended for good."""
        self.crews.pop(rank, None)

    def rank_gone(self, rank: Rank) -> None:
        """A decode rank is proven dead or replaced: nothing can land there any more."""
        for route in self.routes.rank_gone(rank):
            for flight in list(route.flights.values()):
                flight.handoff.apply(MoveQuiet(flight.move, Role.DECODE))

    def reconfigure(self, config: Config) -> None:
        """Use other bounds from now on, also for what is under way."""
        self._stalls.rebound(config.handoff.stall_s)
        self.routes.reconfigure(config)

    def close(self) -> None:
        """Stop all clocks."""
        self.routes.close()
        self._stalls.close()

    # Moves

    def start(self, handoff: Handoff, move: StartMove) -> None:
        """Hand a move to the worker of its prefill rank."""
        source, target = self._ends(handoff, move)
        crew = self.crews.get(source) if source is not None else None
        if crew is None or target is None or not target.alive:
            self._refuse(handoff, move, Reason.INTERNAL, "a rank of the leg has no worker or is gone")
            return
        if crew.worker.hopeless:
            self._refuse(
                handoff, move, Reason.INTERNAL, f"the {crew.worker.name} cannot run: {crew.worker.trouble}"
            )
            return
        route = self.routes.to(crew, target)
        if route.state is RouteState.DOWN and crew.worker.identity is not None:
            # In the pause before the next attempt to connect: fail fast, it may go elsewhere.
            self._refuse(handoff, move, Reason.CONNECT, f"{route.name} is down: {route.trouble}")
            return
        size_bytes = len(move.source_pages) // PAGE_BYTES * route.page_bytes
        flight = Flight(next(self._numbers), handoff, move.move, route, size_bytes)
        self.flights[flight.number] = route.flights[flight.number] = flight
        handoff.flights[move.move] = flight
        if route.state is RouteState.UP:
            self._stalls.sign(flight.number)
        crew.commands.put(Move(flight.number, target.peer, move.source_pages, move.destination_pages))

    def revoke(self, handoff: Handoff, moves: Iterable[int]) -> None:
        """Tell the workers that these moves need not start any more."""
        by_crew: dict[Crew, list[int]] = {}
        for move in moves:
            flight = handoff.flights.get(move)
            if flight is None or flight.ended:
                continue
            self._stalls.discard(flight.number)
            crew = flight.route.crew
            if crew.commands.withdraw(flight.number):
                self._withdrawn(flight)
            else:
                by_crew.setdefault(crew, []).append(flight.number)
        for crew, numbers in by_crew.items():
            crew.commands.put(Revoke(numbers))

    def report(self, worker: Worker, report: Report) -> None:
        """Take a worker's report."""
        match report:
            case MoveDone(move=number):
                self._done(self._flight(worker, number), report)
            case Progress(moves=moves):
                self._progressed(worker, moves)
            case MoveFailedReport(move=number):
                self._failed(self._flight(worker, number), report)
            case MoveSettled(move=number):
                self._settled(self._flight(worker, number))
            case Connected(peer=peer, seconds=seconds):
                self.routes.connected(self.routes.find(worker, peer), seconds)
            case ConnectFailed(peer=peer, message=message):
                self.routes.connect_failed(self.routes.find(worker, peer), message)
            case Fenced(peer=peer, error=error):
                self.routes.fenced(self.routes.find(worker, peer), error)

    # Flights

    def _flight(self, worker: Worker, number: int) -> Flight | None:
        """The flight of that number, if it is this worker's."""
        flight = self.flights.get(number)
        return flight if flight is not None and flight.route.crew.worker is worker else None

    def _done(self, flight: Flight | None, report: MoveDone) -> None:
        if flight is None:
            return
        self._forget(flight)
        flight.handoff.moved_bytes += report.size_bytes
        flight.handoff.apply(Moved(flight.move))

    def _progressed(self, worker: Worker, moves: list[int]) -> None:
        for number in moves:
            if number in self._stalls and self._flight(worker, number) is not None:
                self._stalls.sign(number)

    def _settled(self, flight: Flight | None) -> None:
        if flight is not None and flight.ended:
            self._settle(flight, started=True)

    def _failed(self, flight: Flight | None, report: MoveFailedReport) -> None:
        if flight is None:
            return
        rank = flight.route.rank
        # A broken line is often the first sign of a dead process: then that is the cause to tell.
        if report.kind == "disconnected" and not self.confirm_alive(rank) and report.move not in self.flights:
            return
        failure = Failure(
            _REASONS.get(report.kind, Reason.TRANSPORT), rank.name, f"{flight.route.name}: {report.message}"
        )
        self._flight_failed(flight, failure, settled=report.settled, started=report.started)
        if report.kind == "disconnected" and flight.route.state is RouteState.UP:
            self.routes.connect(flight.route)

    def _flight_failed(self, flight: Flight, failure: Failure, *, settled: bool, started: bool) -> None:
        flight.ended = True
        self._stalls.discard(flight.number)
        untouched = settled and not started
        # The machine first: it fails the handoff, whose other moves are then revoked.
        flight.handoff.apply(MoveFailed(flight.move, failure, untouched, untouched))
        if settled:
            self._settle(flight, started=started)

    def _settle(self, flight: Flight, *, started: bool) -> None:
        if flight.settled:
            return
        flight.settled = True
        self._forget(flight)
        if started:
            flight.handoff.apply(MoveQuiet(flight.move, Role.PREFILL))
        self.quieting.settled(flight, started=started)

    def _withdrawn(self, flight: Flight) -> None:
        """No worker has ever heard of the flight: both its ends are quiet."""
        self._forget(flight)
        for side in Role:
            flight.handoff.apply(MoveQuiet(flight.move, side))

    def _forget(self, flight: Flight) -> None:
        flight.ended = flight.settled = True
        self._stalls.discard(flight.number)
        self.flights.pop(flight.number, None)
        flight.route.flights.pop(flight.number, None)
        flight.handoff.flights.pop(flight.move, None)
        self.quieting.changed(flight.handoff)

    def _refuse(self, handoff: Handoff, move: StartMove, reason: Reason, message: str) -> None:
        handoff.apply(MoveFailed(move.move, Failure(reason, "", message), True, True))  # noqa: FBT003 - both sides are quiet

    def _stalled(self, number: int) -> None:
        flight = self.flights.get(number)
        if flight is not None:
            flight.handoff.fail(
                Reason.STALLED,
                f"{flight.route.name} made no progress for {self._stalls.bound_s:g} s",
                flight.route.rank.name,
            )

    def _ends(self, handoff: Handoff, move: StartMove) -> tuple[Rank | None, Rank | None]:
        if handoff.prefill is None or handoff.decode is None:
            return None, None
        return handoff.prefill.ranks[move.leg[0]], handoff.decode.ranks[move.leg[1]]

    # What becomes of routes (see ``coordinator.routes.RouteEvents``)

    def route_up(self, route: Route) -> None:
        """From now on its flights must get on."""
        for number in route.flights:
            self._stalls.sign(number)

    def route_down(self, route: Route) -> None:
        """Nothing is expected of its flights."""
        for number in route.flights:
            self._stalls.discard(number)

    def route_overdue(self, route: Route, message: str) -> None:
        """Fail what waits for it."""
        for flight in list(route.flights.values()):
            flight.handoff.fail(Reason.CONNECT, message, route.rank.name)

    def route_fenced(self, route: Route, error: str) -> None:
        """Tell who had it fenced."""
        self.quieting.fenced(route, error)
