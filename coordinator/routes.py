"""The ways from workers to decode ranks: opened before they are needed, opened anew, fenced.

A *route* is what one worker knows of one decode rank: its link is connecting, up, being fenced, or down. A
*crew* is a worker with its commands and its routes. What flies on a route is its owner's matter
(``coordinator.transfers``), which hears of what concerns it.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from coordinator.logs import get_logger
from coordinator.messages import ConnectPeer, FencePeer
from coordinator.slices import page_bytes, slice_of
from coordinator.watch import Watch
from coordinator.worker.supervisor import CommandQueue, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.config import Config
    from coordinator.groups import Rank
    from coordinator.metrics import Counters
    from coordinator.transfers import Flight

#: Pauses before connecting again to a rank that could not be reached, or fencing a link that could not be.
RECONNECT_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)

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


class Crew:
    """A worker with its command queue and its routes."""

    __slots__ = ("commands", "routes", "worker")

    def __init__(self, worker: Worker, send: Callable[[list[bytes]], bool]) -> None:
        """A worker that has no routes yet."""
        self.worker = worker
        self.commands = CommandQueue(send, worker)
        self.routes: dict[str, Route] = {}


class RouteEvents(Protocol):
    """Who acts on what becomes of routes."""

    def route_up(self, route: Route) -> None:
        """A link is open: what waits for it moves now."""

    def route_down(self, route: Route) -> None:
        """A link is gone, or about to go: nothing is expected to move on it."""

    def route_overdue(self, route: Route, message: str) -> None:
        """A link could not be opened in time."""

    def route_fenced(self, route: Route, error: str) -> None:
        """A fence was answered."""


class Routes:
    """All crews and their routes.

    Attributes:
        crews: by the prefill rank that each works for.

    """

    def __init__(self, config: Config, counters: Counters, events: RouteEvents) -> None:
        """Start with no crew."""
        self.crews: dict[Rank, Crew] = {}
        self._counters = counters
        self._events = events
        self._overdue: Watch[Route] = Watch(config.peer.connect_s, self._connect_overdue)

    def find(self, worker: Worker, peer: str) -> Route | None:
        """Return a worker's route to a peer."""
        crew = self.crews.get(worker.rank)
        return crew.routes.get(peer) if crew is not None else None

    def to(self, crew: Crew, target: Rank) -> Route:
        """Return a crew's route to a decode rank, which is made when there is none."""
        route = crew.routes.get(target.peer)
        if route is None:
            route = crew.routes[target.peer] = Route(crew, target)
            if crew.worker.identity is not None:
                self.connect(route)
        return route

    # Decode ranks come and go

    def open(self, source: Rank, target: Rank) -> None:
        """Open the way from a prefill rank's worker to a decode rank, before it is needed."""
        crew = self.crews.get(source)
        if crew is None:
            return
        route = self.to(crew, target)
        # A rank that was silent for a while has come back, and its link was freed meanwhile.
        if route.state is RouteState.DOWN and route.retry is None and crew.worker.identity is not None:
            self.connect(route)
        elif route.state is RouteState.FENCING and route not in self._overdue:
            self._overdue.sign(route)

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

    def rank_gone(self, rank: Rank) -> list[Route]:
        """Drop the ways to a decode rank that is proven dead or replaced; returns them."""
        routes = [crew.routes[rank.peer] for crew in self.crews.values() if rank.peer in crew.routes]
        for route in routes:
            self._drop(route)
        return routes

    def forget(self, rank: Rank) -> None:
        """Drop the ways to a rank that did not come back, unless something may still move there."""
        for crew in self.crews.values():
            route = crew.routes.get(rank.peer)
            if route is not None and not route.flights:
                self._drop(route)

    def rank_moved(self, rank: Rank) -> None:
        """A decode rank is reached elsewhere now: what was on its way to its former endpoint fails."""
        for crew in self.crews.values():
            route = crew.routes.get(rank.peer)
            if route is not None and crew.worker.identity is not None:
                # Its moves fail with its link; the answer to the fence connects it anew. It may never come.
                self.fence(route)
                self._overdue.sign(route)

    # Workers come and go

    def worker_up(self, crew: Crew) -> None:
        """Connect a worker's new life to everything that it has routes to."""
        for route in crew.routes.values():
            self.connect(route)

    def worker_down(self, crew: Crew) -> None:
        """A worker is dead, and all its links with it."""
        for route in crew.routes.values():
            route.state = RouteState.DOWN
            self._forget_clocks(route)

    def reconfigure(self, config: Config) -> None:
        """Use other bounds from now on, also for what is under way."""
        self._overdue.rebound(config.peer.connect_s)

    def close(self) -> None:
        """Stop all clocks."""
        self._overdue.close()
        for crew in self.crews.values():
            for route in crew.routes.values():
                self._forget_clocks(route)

    # Links

    def connect(self, route: Route) -> None:
        """Have a route's link opened."""
        hello, pool = route.rank.hello, route.rank.hello.pool
        route.state = RouteState.CONNECTING
        route.retry = None
        self._overdue.sign(route)
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

    def connected(self, route: Route | None, seconds: float) -> None:
        """A worker has opened a link."""
        if route is None or route.state is not RouteState.CONNECTING:
            return
        route.state = RouteState.UP
        route.failures = 0
        route.trouble = ""
        self._counters.connects += 1
        self._counters.reconnects += route.was_up
        route.was_up = True
        self._overdue.discard(route)
        self._events.route_up(route)
        _log.info(
            "peer.connected",
            peer=route.rank.name,
            worker=route.crew.worker.rank.name,
            seconds=round(seconds, 4),
        )

    def connect_failed(self, route: Route | None, message: str) -> None:
        """A worker could not open a link: it tries again later."""
        if route is None or route.state is not RouteState.CONNECTING:
            return
        self._forget_clocks(route)
        route.state = RouteState.DOWN
        route.trouble = message
        self._counters.connect_failures += 1
        pause_s = self._retry(route, self.connect) if route.rank.alive else None
        _log.warning("peer.connect_failed", peer=route.rank.name, error=message, retry_s=pause_s)

    def fence(self, route: Route) -> None:
        """Have a route's link destroyed; ``route_fenced`` hears of the answer."""
        if route.state is not RouteState.FENCING:
            route.state = RouteState.FENCING
            self._forget_clocks(route)
            route.crew.commands.put(FencePeer(route.rank.peer))

    def fenced(self, route: Route | None, error: str) -> None:
        """A worker has destroyed a link, or could not."""
        if route is None or route.state is not RouteState.FENCING:
            return
        route.state = RouteState.DOWN
        route.trouble = error or "fenced"
        self._events.route_fenced(route, error)
        if not route.rank.alive or route.crew.worker.identity is None:
            return
        if error:
            # A worker that nobody can kill goes on with it: perhaps it can be fenced later.
            self._retry(route, self.fence)
        else:
            self.connect(route)

    def _connect_overdue(self, route: Route) -> None:
        message = f"{route.name}: not connected within {self._overdue.bound_s:g} s"
        self._counters.connect_failures += 1
        _log.error("peer.connect_expired", peer=route.rank.name, worker=route.crew.worker.rank.name)
        self._events.route_overdue(route, message)
        if route.rank.alive:
            self._overdue.sign(route)
        else:
            route.state = RouteState.DOWN
            route.trouble = message

    def _retry(self, route: Route, call: Callable[[Route], None]) -> float:
        """Do something about a route once more after a pause, which is returned."""
        pause_s = RECONNECT_PAUSES_S[min(route.failures, len(RECONNECT_PAUSES_S) - 1)]
        route.failures += 1
        route.retry = asyncio.get_running_loop().call_later(pause_s, call, route)
        return pause_s

    def _drop(self, route: Route) -> None:
        """Forget a route, and have its link destroyed if there is one."""
        del route.crew.routes[route.rank.peer]
        self._forget_clocks(route)
        if route.crew.worker.identity is not None:
            route.crew.commands.put(FencePeer(route.rank.peer))

    def _forget_clocks(self, route: Route) -> None:
        self._overdue.discard(route)
        self._events.route_down(route)
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
