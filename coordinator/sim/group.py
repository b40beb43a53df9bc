"""A handle on one simulated engine: start, feed, hurt, restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.sim.book import Party
from coordinator.sim.errors import SimulationError
from coordinator.sim.wire import Cancel, Finish, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.sim.child import Child
    from coordinator.sim.settings import RankSettings
    from coordinator.sim.wire import Command, Ready, Request


class EngineGroup:
    """All ranks of one engine, each a process of its own.

    ``start_rank``, ``send`` and ``lost`` are the driver's: how a rank is started, how a command
    reaches rank 0 of a group, and who hears that ranks were killed on purpose.
    """

    def __init__(
        self,
        settings: RankSettings,
        start_rank: Callable[[RankSettings], Child],
        send: Callable[[Party, Command], None],
        lost: Callable[[Party, Sequence[int]], None],
    ) -> None:
        """Remember how to start; ``settings`` are those of rank 0, the other ranks differ in number."""
        self.role = settings.role
        self.name = settings.group
        self.world_size = settings.world_size
        self.incarnation = 0
        self.ready: dict[int, Ready] = {}
        self.children: list[Child] = []
        self._settings = settings
        self._start_rank = start_rank
        self._send = send
        self._lost = lost

    @property
    def party(self) -> Party:
        """The incarnation that runs now."""
        return Party(self.name, self.incarnation, self.world_size)

    @property
    def is_ready(self) -> bool:
        """Whether every rank has reported that its whole group is ready."""
        return len(self.ready) == self.world_size

    def start(self) -> None:
        """Start a new incarnation; returns at once, the driver hears when it is ready.

        Raises:
            SimulationError: a rank still runs, or a process cannot be started.

        """
        if any(child.alive for child in self.children):
            message = f"{self.name}: kill or finish the old incarnation before a new one starts"
            raise SimulationError(message)
        self.incarnation += 1
        self.ready = {}
        self.children = [self._spawn(rank) for rank in range(self.world_size)]

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in order, on every rank in the same step."""
        self._send(self.party, Submit(list(requests)))

    def cancel(self, rooms: Sequence[int], why: str) -> None:
        """Give rooms up; those that have an outcome already are left alone."""
        self._send(self.party, Cancel(list(rooms), why))

    def finish(self) -> None:
        """Let every rank make a last step, report its final state and end."""
        for child in self.children:
            child.expect_end()
        self._send(self.party, Finish())

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL one rank, or all at once; returns when they are gone."""
        ranks = range(self.world_size) if rank is None else (rank,)
        for number in ranks:
            self.children[number].kill()
        for number in ranks:
            self.children[number].join(10)
        self._lost(self.party, list(ranks))

    def restart(self) -> None:
        """Kill whatever still runs and start a new incarnation."""
        if self.children:
            self.kill()
        self.start()

    def stop(self, rank: int) -> None:
        """SIGSTOP one rank: it stands still, its sockets stay open."""
        self.children[rank].stop()

    def cont(self, rank: int) -> None:
        """SIGCONT one rank."""
        self.children[rank].cont()

    def check(self) -> None:
        """Raise SimulationError when a rank has ended without being asked to."""
        for child in self.children:
            child.check()

    def join(self, timeout_s: float) -> None:
        """Wait for the ranks' end; SIGKILL for those that still run after ``timeout_s``."""
        for child in self.children:
            child.join(timeout_s)

    def _spawn(self, rank: int) -> Child:
        return self._start_rank(
            msgspec.structs.replace(self._settings, rank=rank, incarnation=self.incarnation)
        )
