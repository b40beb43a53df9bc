"""Moves on their way: which worker writes to which decode rank, and what has become of it.

A *flight* is one move handed to a worker. A *route* is what one worker knows of one decode rank: its
link is connecting, up or down. Reports come in, events go to the handoffs' machines.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from coordinator.events import Moved, MoveFailed, MoveQuiet, StartMove
from coordinator.logs import get_logger
from coordinator.messages import (
    PAGE_BYTES,
    Connected,
    ConnectFailed,
    ConnectPeer,
    Fenced,
    FencePeer,
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
from coordinator.slices import page_bytes, slice_of
from coordinator.watch import Watch
from coordinator.worker.supervisor import CommandQueue, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from coordinator.config import Config
    from coordinator.groups import Rank
    from coordinator.handoff import Handoff
    from coordinator.metrics import Counters

#: Pauses before connecting again to a rank that could not be reached, seconds.
RECONNECT_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)

_REASONS: Final = {
    "connect": Reason.CONNECT,
    "disconnected": Reason.TRANSPORT,
    "transport": Reason.TRANSPORT,
    "revoked": Reason.TRANSPORT,
}

_log = get_logger()


class RouteState(StrEnum):
    """What is known of a worker's link to a decode rank."""

    CONNECTING = "connecting"
    UP = "up"
    FENCING = "fencing"
    DOWN = "down"


class Route:
    """One worker's way to one decode rank, on which each page takes ``page_bytes``."""

    __slots__ = ("crew", "failures", "flights", "page_bytes", "rank", "retry", "state", "trouble", "was_up")

    def __init__(self, crew: Crew, rank: Rank) -> None:
        """A way that is not open yet."""
        self.crew = crew
        self.rank = rank
        self.page_bytes = _page_bytes(crew.worker.rank, rank)
        self.state = RouteState.DOWN
        self.flights: dict[int, Flight] = {}
        self.failures = 0
        self.trouble = ""
        self.retry: asyncio.TimerHandle | None = None
        self.was_up = False

    @property
    def name(self) -> str:
        """Names both ends."""
        return f"{self.crew.worker.rank.name} -> {self.rank.name}"


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


class Crew:
    """A worker with its command queue and its routes."""

    __slots__ = ("commands", "routes", "worker")

    def __init__(self, worker: Worker, send: Callable[[list[bytes]], bool]) -> None:
        """A worker that has no routes yet."""
        self.worker = worker
        self.commands = CommandQueue(send, worker)
        self.routes: dict[str, Route] = {}


class Quieting(Protocol):
    """Who sees to it that failed flights become quiet (``coordinator.release``)."""

    def settled(self, flight: Flight, *, started: bool) -> None:
        """The source of a failed flight is quiet; its destination may not be."""

    def changed(self, handoff: Handoff) -> None:
        """One of the handoff's flights is over."""

    def fenced(self, route: Route, error: str) -> None:
        """A fence was answered."""


class Transfers:
    """All flights and routes. Owned by the service; every call is on the event loop."""

    def __init__(self, config: Config, send: Callable[[list[bytes]], bool], counters: Counters) -> None:
        """``send`` puts a message on the control socket."""
        self.crews: dict[Rank, Crew] = {}
        self.flights: dict[int, Flight] = {}
        self.quieting: Quieting
        self.confirm_alive: Callable[[Rank], bool]
        self._send = send
        self._counters = counters
        self._numbers = count(1)
        self._stalls: Watch[int] = Watch(config.handoff.stall_s, self._stalled)
        self._connects: Watch[Route] = Watch(config.peer.connect_s, self._connect_expired)

    # Workers and decode ranks come and go

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
        for route in crew.routes.values():
            self._connect(route)
        for command in waiting:
            crew.commands.put(command)
        crew.commands.flush()

    def worker_down(self, worker: Worker, cause: str) -> None:
        """Fail what a dead worker had: its source is quiet now."""
        crew = self.crews.get(worker.rank)
        if crew is None:
            return
        unsent = {command.move for command in crew.commands.clear() if isinstance(command, Move)}
        for route in crew.routes.values():
            route.state = RouteState.DOWN
            self._forget_clocks(route)
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

    def connect(self, source: Rank, target: Rank) -> None:
        """Open the way from a prefill rank's worker to a decode rank, before it is needed."""
        crew = self.crews.get(source)
        if crew is None:
            return
        route = self._route(crew, target)
        # A rank that was silent for a while has come back, and its link was freed meanwhile.
        if route.state is RouteState.DOWN and route.retry is None and crew.worker.identity is not None:
            self._connect(route)
        elif route.state is RouteState.FENCING and route not in self._connects:
            self._connects.sign(route)

    def rank_lost(self, rank: Rank) -> None:
        """Free the links to a decode rank that is lost; one with moves is left to who makes them quiet."""
        for crew in self.crews.values():
            route = crew.routes.get(rank.peer)
            if route is None or route.flights or crew.worker.identity is None:
                continue
            if route.state is RouteState.DOWN:
                self._forget_clocks(route)
            else:
                self.fence(route)

    def rank_gone(self, rank: Rank) -> None:
        """A decode rank is proven dead or replaced: nothing can land there any more."""
        for crew in self.crews.values():
            route = crew.routes.pop(rank.peer, None)
            if route is None:
                continue
            self._forget_clocks(route)
            if crew.worker.identity is not None:
                crew.commands.put(FencePeer(rank.peer))
            for flight in list(route.flights.values()):
                flight.handoff.apply(MoveQuiet(flight.move, Role.DECODE))

    def forget(self, rank: Rank) -> None:
        """Drop the ways to a rank that did not come back, unless something may still move there."""
        for crew in self.crews.values():
            route = crew.routes.get(rank.peer)
            if route is None or route.flights:
                continue
            del crew.routes[rank.peer]
            self._forget_clocks(route)
            if crew.worker.identity is not None:
                crew.commands.put(FencePeer(rank.peer))

    def rank_moved(self, rank: Rank) -> None:
        """A decode rank is reached elsewhere now: what was on its way to its former endpoint fails."""
        for crew in self.crews.values():
            route = crew.routes.get(rank.peer)
            if route is not None and crew.worker.identity is not None:
                # Its moves fail with its link; the answer to the fence connects it anew.
                self.fence(route)

    def reconfigure(self, config: Config) -> None:
        """Use other bounds from now on, also for what is under way."""
        self._stalls.rebound(config.handoff.stall_s)
        self._connects.rebound(config.peer.connect_s)

    def close(self) -> None:
        """Stop all clocks."""
        self._stalls.close()
        self._connects.close()
        for crew in self.crews.values():
            for route in crew.routes.values():
                self._forget_clocks(route)

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
        route = self._route(crew, target)
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

    def fence(self, route: Route) -> None:
        """Have a route's link destroyed; ``Quieting.fenced`` hears of the answer."""
        if route.state is not RouteState.FENCING:
            route.state = RouteState.FENCING
            self._forget_clocks(route)
            route.crew.commands.put(FencePeer(route.rank.peer))

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
                self._connected(self._find(worker, peer), seconds)
            case ConnectFailed(peer=peer, message=message):
                self._connect_failed(self._find(worker, peer), message)
            case Fenced(peer=peer, error=error):
                self._fenced(self._find(worker, peer), error)

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
            self._connect(flight.route)

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

    # Routes

    def _find(self, worker: Worker, peer: str) -> Route | None:
        crew = self.crews.get(worker.rank)
        return crew.routes.get(peer) if crew is not None else None

    def _route(self, crew: Crew, target: Rank) -> Route:
        route = crew.routes.get(target.peer)
        if route is None:
            route = crew.routes[target.peer] = Route(crew, target)
            if crew.worker.identity is not None:
                self._connect(route)
        return route

    def _connect(self, route: Route) -> None:
        hello, pool = route.rank.hello, route.rank.hello.pool
        route.state = RouteState.CONNECTING
        route.retry = None
        self._connects.sign(route)
        route.crew.commands.put(
            ConnectPeer(
                route.rank.peer,
                hello.endpoint,
                hello.layout,
                hello.world_size,
                hello.rank,
                pool.pages,
                pool.regions,
            )
        )

    def _connected(self, route: Route | None, seconds: float) -> None:
        if route is None or route.state is not RouteState.CONNECTING:
            return
        route.state = RouteState.UP
        route.failures = 0
        route.trouble = ""
        self._counters.connects += 1
        self._counters.reconnects += route.was_up
        route.was_up = True
        self._connects.discard(route)
        for number in route.flights:
            self._stalls.sign(number)
        _log.info(
            "peer.connected",
            peer=route.rank.name,
            worker=route.crew.worker.rank.name,
            seconds=round(seconds, 4),
        )

    def _connect_failed(self, route: Route | None, message: str) -> None:
        if route is None or route.state is not RouteState.CONNECTING:
            return
        self._forget_clocks(route)
        route.state = RouteState.DOWN
        route.trouble = message
        pause_s = RECONNECT_PAUSES_S[min(route.failures, len(RECONNECT_PAUSES_S) - 1)]
        route.failures += 1
        self._counters.connect_failures += 1
        _log.warning("peer.connect_failed", peer=route.rank.name, error=message, retry_s=pause_s)
        if route.rank.alive:
            route.retry = asyncio.get_running_loop().call_later(pause_s, self._connect, route)

    def _connect_expired(self, route: Route) -> None:
        message = f"{route.name}: not connected within {self._connects.bound_s:g} s"
        self._counters.connect_failures += 1
        _log.error("peer.connect_expired", peer=route.rank.name, worker=route.crew.worker.rank.name)
        for flight in list(route.flights.values()):
            flight.handoff.fail(Reason.CONNECT, message, route.rank.name)
        if route.rank.alive:
            self._connects.sign(route)
        else:
            route.state = RouteState.DOWN
            route.trouble = message

    def _fenced(self, route: Route | None, error: str) -> None:
        if route is None or route.state is not RouteState.FENCING:
            return
        route.state = RouteState.DOWN
        route.trouble = error or "fenced"
        self.quieting.fenced(route, error)
        if not error and route.rank.alive and route.crew.worker.identity is not None:
            self._connect(route)

    def _forget_clocks(self, route: Route) -> None:
        self._connects.discard(route)
        for number in route.flights:
            self._stalls.discard(number)
        if route.retry is not None:
            route.retry.cancel()
            route.retry = None


def _page_bytes(source: Rank, target: Rank) -> int:
    """Bytes that a leg carries of each page."""
    prefill, decode = source.group, target.group
    piece = slice_of(
        prefill.layout, prefill.world_size, source.number, decode.layout, decode.world_size, target.number
    )
    return page_bytes(prefill.layout, piece)
