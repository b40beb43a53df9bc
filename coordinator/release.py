"""Pages are released when they are quiet: the rules, and the ladder that makes them so.

The verdict of a handoff is never delayed by this, and nothing is released unproven.

    source       quiet when the worker says that the move is settled, its link is fenced, or the
                 worker's process is dead; or, of a worker in its rank's process, its next life begins
    destination  quiet after that *and*, where the backend's bytes may still land, when the decode
                 rank has run for ``drain_s``; or at once when that rank is gone

Ladder after a failure: wait ``settle_s`` for the moves to end -> fence the peers concerned -> kill
the worker, unless it runs in its rank's own process -> hold for ever.

An engine that moves the pages by itself cannot be fenced from itself: it is waited for. After
``settle_s`` that is an operator's matter (``release.unquiet``, and not ready), and it stays so until
the engine says that they are quiet or its process has ended. Whoever sets ``unproven_s`` has them let
go at that bound all the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from coordinator.events import MoveQuiet
from coordinator.logs import get_logger
from coordinator.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from coordinator.config import RankBounds, ReleaseBounds
    from coordinator.handoff import Handoff
    from coordinator.quarantine import Quarantine
    from coordinator.routes import Route
    from coordinator.transfers import Flight, Transfers

_log = get_logger()


class Releases:
    """Sees to it that the pages of failed handoffs become quiet."""

    def __init__(self, bounds: ReleaseBounds, transfers: Transfers, signs: RankBounds) -> None:
        """Use force through ``transfers``."""
        self.bounds = bounds
        self.quarantine: Quarantine
        self._transfers = transfers
        self._signs = signs
        self._waiting: dict[Handoff, asyncio.Event] = {}
        transfers.quieting = self

    def __len__(self) -> int:
        """How many handoffs have failed and are not quiet."""
        return len(self._waiting)

    async def make_quiet(self, handoff: Handoff) -> None:
        """Climb the ladder until both sides of the handoff are released. May never return."""
        changed = self._waiting[handoff] = asyncio.Event()
        try:
            if handoff.prefill is not None and handoff.prefill.moves_itself:
                await self._told_quiet(handoff, changed)
            for force in (self._fence, self._kill):
                if await self._settled_within(handoff, changed, self.bounds.settle_s):
                    break
                force(handoff)
            while handoff.machine.held:
                changed.clear()
                await changed.wait()
        finally:
            del self._waiting[handoff]

    def reconfigure(self, bounds: ReleaseBounds) -> None:
        """Use other bounds from now on, also for what an engine leaves open."""
        self.bounds = bounds
        for changed in self._waiting.values():
            changed.set()

    def changed(self, handoff: Handoff) -> None:
        """Wake the ladder of a handoff: one of its moves settled, or a side was released."""
        event = self._waiting.get(handoff)
        if event is not None:
            event.set()

    def settled(self, flight: Flight, *, started: bool) -> None:
        """The source of a failed flight is quiet: see to its destination."""
        self.changed(flight.handoff)
        if started and flight.route.crew.worker.lands_after_settled:
            self._drain(flight, asyncio.get_running_loop().time())
        else:
            self._destination_quiet(flight)

    def fenced(self, route: Route, error: str) -> None:
        """A fence was answered; one that did not work leaves only the process itself."""
        if error:
            route.crew.worker.kill(f"the link to {route.rank.name} cannot be fenced: {error}")

    def _drain(self, flight: Flight, since_s: float) -> None:
        """Hold the destination until what had left the source at ``since_s`` has landed."""
        rank = flight.route.rank
        if rank.gone or rank.has_drained(since_s, self.bounds.drain_s, self._signs.break_s):
            self._destination_quiet(flight)
        else:
            pause_s = self._signs.heartbeat_s / 4
            asyncio.get_running_loop().call_later(pause_s, self._drain, flight, since_s)

    def _destination_quiet(self, flight: Flight) -> None:
        flight.handoff.apply(MoveQuiet(flight.move, Role.DECODE))
        self.changed(flight.handoff)

    async def _told_quiet(self, handoff: Handoff, changed: asyncio.Event) -> None:
        """Wait until the engine has told that it is done with the pages."""
        if await self._told_within(handoff, changed, lambda: self.bounds.settle_s):
            return
        self.quarantine.left_open(handoff)
        _log.error("release.unquiet", **_whose(handoff), held_s=self.bounds.settle_s)
        if await self._told_within(handoff, changed, lambda: self.bounds.unproven_s):
            return
        _log.error("release.unproven", **_whose(handoff), held_s=self.bounds.unproven_s)
        for move in handoff.machine.unsettled:
            for side in Role:
                handoff.apply(MoveQuiet(move, side))

    async def _told_within(
        self, handoff: Handoff, changed: asyncio.Event, bound_s: Callable[[], float | None]
    ) -> bool:
        """Wait until the pages are released; False at the bound, which may change meanwhile. None: never."""
        while handoff.machine.held:
            changed.clear()
            bound = bound_s()
            try:
                async with asyncio.timeout_at(None if bound is None else handoff.concluded_at_s + bound):
                    await changed.wait()
            except TimeoutError:
                return False
        return True

    async def _settled_within(self, handoff: Handoff, changed: asyncio.Event, bound_s: float) -> bool:
        """Wait until no flight of the handoff can read its source any more; False at the bound."""
        try:
            async with asyncio.timeout(bound_s):
                while handoff.flights:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            return False
        return True

    def _fence(self, handoff: Handoff) -> None:
        for route in _each(flight.route for flight in handoff.flights.values()):
            _log.warning(
                "release.fence", room=handoff.room, attempt=handoff.machine.attempt, route=route.name
            )
            self._transfers.routes.fence(route)

    def _kill(self, handoff: Handoff) -> None:
        for worker in _each(flight.route.crew.worker for flight in handoff.flights.values()):
            worker.kill(f"a move of room {handoff.room} cannot be made quiet in another way")


def _whose(handoff: Handoff) -> dict[str, object]:
    group = handoff.prefill
    ranks = [] if group is None else [f"{group.name}/{rank}" for rank in handoff.machine.unsettled]
    return {"room": handoff.room, "attempt": handoff.machine.attempt, "ranks": ranks}


_T = TypeVar("_T")


def _each(items: Iterable[_T]) -> list[_T]:
    """Each item once, in order."""
    return list(dict.fromkeys(items))
