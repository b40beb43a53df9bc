"""Carries out a script of faults, and cleans up behind it as the router of a real deployment does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.replay.script import Abort, Restart, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.replay.router import Router
    from coordinator.replay.script import Fault
    from coordinator.sim.book import Handoff
    from coordinator.sim.cluster import Cluster
    from coordinator.sim.group import EngineGroup


@dataclass(slots=True)
class _Restarting:
    """An engine that is coming back, and what it had in hand when it was killed."""

    group: EngineGroup
    killed_s: float
    orphans: list[Handoff]


class Faults:
    """What goes wrong in a run.

    Attributes:
        done: when each fault that has happened did so, in seconds of the trace, and what it was.

    """

    def __init__(
        self, cluster: Cluster, router: Router, faults: Sequence[Fault], tell: Callable[[str], None]
    ) -> None:
        """Prepare; ``faults`` are in the order of their times, and ``tell`` hears of them."""
        self.done: list[tuple[float, Fault]] = []
        self._cluster = cluster
        self._router = router
        self._faults = list(faults)
        self._tell = tell
        self._restarting: list[_Restarting] = []
        self._stopped: list[tuple[float, EngineGroup, Stop]] = []

    @property
    def pending(self) -> bool:
        """Whether something is still to happen, or to be mended."""
        return bool(self._faults or self._restarting or self._stopped)

    def tick(self, now_s: float) -> None:
        """Do what is due at ``now_s`` of the trace, and mend what can be mended.

        Raises:
            SimulationError: a process cannot be started, or does not stop.

        """
        while self._faults and self._faults[0].at_s <= now_s and not self._is_busy(self._faults[0]):
            fault = self._faults.pop(0)
            self.done.append((now_s, fault))
            match fault:
                case Restart():
                    self._restart(self._cluster.groups[fault.group])
                case Stop():
                    self._stop(fault)
                case Abort():
                    self._abort(fault)
        self._continue()
        self._mend()

    def _is_busy(self, fault: Fault) -> bool:
        """Whether it must wait: its engine is not there, or a rank of it stands still."""
        if isinstance(fault, Abort):
            return False
        stopped = any(stop.group == fault.group for _, _, stop in self._stopped)
        return stopped or not self._cluster.groups[fault.group].is_ready

    def _restart(self, group: EngineGroup) -> None:
        party = group.party
        orphans = [
            handoff
            for handoff in self._cluster.book.open.values()
            if party in (handoff.prefill, handoff.decode) and handoff.outcome is None
        ]
        self._tell(f"{party} is killed now (SIGKILL) with {len(orphans)} handoffs on their way")
        killed_s = time.monotonic()
        group.kill()
        self._router.forget(party)
        group.start()
        self._restarting.append(_Restarting(group, killed_s, orphans))

    def _stop(self, stop: Stop) -> None:
        self._tell(str(stop))
        group = self._cluster.groups[stop.group]
        group.stop(stop.rank)
        self._stopped.append((time.monotonic() + stop.for_s, group, stop))

    def _abort(self, abort: Abort) -> None:
        """Give up what is longest on its way, on all ranks of one side."""
        chosen = [handoff for handoff in self._cluster.book.open.values() if handoff.outcome is None]
        rooms: dict[str, list[int]] = {}
        for handoff in chosen[: abort.requests]:
            party = handoff.prefill if abort.by == "prefill" else handoff.decode
            if self._cluster.groups[party.group].is_ready:
                rooms.setdefault(party.group, []).append(handoff.request.room)
        self._tell(f"{abort.by} gives up rooms {sorted(room for own in rooms.values() for room in own)}")
        for name, own in rooms.items():
            self._cluster.groups[name].cancel(own, "its client has gone")

    def _continue(self) -> None:
        now_s = time.monotonic()
        for until_s, group, stop in [each for each in self._stopped if each[0] <= now_s]:
            group.cont(stop.rank)
            self._stopped.remove((until_s, group, stop))

    def _mend(self) -> None:
        """See who is back; give up what an engine had queued when it died, but not told of."""
        for restarting in [each for each in self._restarting if each.group.is_ready]:
            self._restarting.remove(restarting)
            took_s = time.monotonic() - restarting.killed_s
            self._tell(f"{restarting.group.party} is ready {took_s:.2f} s after the kill")
            for handoff in restarting.orphans:
                if handoff.outcome is None:
                    self._give_up(handoff, restarting.group)

    def _give_up(self, handoff: Handoff, restarted: EngineGroup) -> None:
        for party in (handoff.prefill, handoff.decode):
            group = self._cluster.groups[party.group]
            if group is not restarted and group.is_ready:
                group.cancel([handoff.request.room], f"{restarted.name} was restarted")
