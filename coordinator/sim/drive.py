"""The router of a simulation: drives handoffs, kills decode in the middle, and sees what becomes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from coordinator.sim.errors import SimulationError
from coordinator.sim.summary import Summary, Times, summarize
from coordinator.sim.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.sim.book import Handoff
    from coordinator.sim.cluster import Cluster
    from coordinator.sim.group import EngineGroup
    from coordinator.sim.wire import Request

#: Handoffs that are certainly in flight when decode is killed.
_BURST: Final = 8
#: How long they have been so, at least, when it is.
_IN_FLIGHT_S: Final = 0.05
#: How long other handoffs are under way then.
_ANY_STATE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """What to drive.

    Attributes:
        handoffs: how many.
        concurrency: how many at once.
        kill_decode: SIGKILL the decode engine in the middle, and start a new incarnation.
        kill_coordinator: SIGKILL the coordinator in the middle, and start it again at its address.
        settle_s: bound of every wait for handoffs to be over.
        seed: of the workload.

    """

    handoffs: int = 200
    concurrency: int = 8
    kill_decode: bool = True
    kill_coordinator: bool = False
    settle_s: float = 60.0
    seed: int = 0


class Drive:
    """One run over one prefill and one decode engine, which are ready."""

    def __init__(
        self,
        cluster: Cluster,
        prefill: EngineGroup,
        decode: EngineGroup,
        options: DriveOptions,
        tell: Callable[[str], None],
        tick: Callable[[], None],
    ) -> None:
        """Prepare; ``tell`` hears what happens, in sentences; ``tick`` is called often."""
        self._cluster = cluster
        self._book = cluster.book
        self._prefill = prefill
        self._decode = decode
        self._options = options
        self._tell = tell
        self._tick = tick
        self._workload = Workload(options.seed, cluster.options.pages)
        self._left = options.handoffs
        self._seen = 0
        self._times = Times(time.monotonic(), 0.0)

    def run(self) -> Summary:
        """Drive all handoffs to their end; never raises what the simulation itself brings about."""
        problems: list[str] = []
        try:
            self._drive()
        except SimulationError as error:
            problems.append(str(error))
        self._times.end_s = time.monotonic()
        problems += self._without_success()
        # Also after a wait in vain: the last states tell who holds what.
        problems += self._cluster.finish_clean(self._options.settle_s)
        options = self._cluster.options
        return summarize(
            self._book,
            options.backend,
            options.layout,
            self._decode.world_size,
            self._times,
            problems,
        )

    def _drive(self) -> None:
        self._warm_up()
        if self._options.kill_decode:
            burst = max(1, min(_BURST, self._options.handoffs // 4))
            self._feed(until_left=(self._left + burst) // 2)
            self._heal(self._kill_in_flight(burst))
        if self._options.kill_coordinator:
            burst = max(1, min(_BURST, self._options.handoffs // 4))
            self._feed(until_left=(self._left + burst) // 2)
            self._replace_coordinator(self._catch_in_flight(burst))
        self._feed(until_left=0)
        self._wait(lambda: not self._book.open, "every handoff to be over on every rank")

    def _warm_up(self) -> None:
        """Hand over one request alone: workers start and connect for it, the others find them there."""
        if self._left <= _BURST:
            return
        before_s = time.monotonic()
        self._feed(until_left=self._left - 1)
        self._wait(lambda: not self._book.open, "the first handoff to be over")
        first_s = time.monotonic() - before_s
        self._tell(f"the first handoff took {first_s:.2f} s, with workers that start and connect for it")

    def _feed(self, until_left: int) -> None:
        """Submit ordinary requests, a bounded number at once, until so many are left."""
        while self._left > until_left:
            self._wait(lambda: len(self._book.open) < self._options.concurrency, "a handoff to be over")
            room = self._options.concurrency - len(self._book.open)
            self._submit([self._workload.ordinary() for _ in range(min(room, self._left - until_left))])

    def _kill_in_flight(self, burst: int) -> list[Handoff]:
        """Kill decode while handoffs to it are in flight for certain; returns these handoffs."""
        caught = self._catch_in_flight(burst)
        # And others in whatever state they will be.
        others = min(self._options.concurrency, self._left // 2)
        self._submit([self._workload.ordinary() for _ in range(others)])
        self._pause(_ANY_STATE_S)
        doomed = sum(1 for handoff in self._book.open.values() if handoff.outcome is None)
        self._tell(f"{self._decode.name} is killed now (SIGKILL) with {doomed} handoffs on their way to it")
        self._times.killed_s = time.monotonic()
        self._decode.kill()
        return caught

    def _catch_in_flight(self, burst: int) -> list[Handoff]:
        """Submit slow prompts until all ranks of both engines have some in hand.

        Raises:
            SimulationError: however slow they are, they are over before that is known.

        """
        while self._left:
            requests = [self._workload.slow() for _ in range(min(burst, self._left))]
            self._submit(requests)
            slow = [self._book.open[request.room] for request in requests]
            self._wait(partial(_begun, slow), "slow handoffs to be in flight")
            # What was told to the coordinator a moment ago is to have reached it before the kill.
            self._pause(_IN_FLIGHT_S)
            caught = [handoff for handoff in slow if handoff.in_flight]
            if caught:
                return caught
        message = "every handoff was over before decode could be killed: this host is too busy"
        raise SimulationError(message)

    def _heal(self, caught: list[Handoff]) -> None:
        """Start decode anew; go on once it is ready and what it had in hand has failed everywhere."""
        orphans = [handoff for handoff in self._book.open.values() if handoff.waiting]
        self._decode.start()

        def healed() -> bool:
            now_s = time.monotonic()
            if self._times.failed_everywhere_s is None and not any(handoff.waiting for handoff in caught):
                self._times.failed_everywhere_s = now_s
                self._tell_since_kill(f"{len(caught)} handoffs had failed on every prefill rank", now_s)
            if self._times.ready_again_s is None and self._decode.is_ready:
                self._times.ready_again_s = now_s
                self._tell_since_kill(f"a new incarnation of {self._decode.name} was ready", now_s)
            return self._times.failed_everywhere_s is not None and self._times.ready_again_s is not None

        self._wait(healed, "the old handoffs to fail and the new decode engine to be ready")
        # As a router does: requests that decode had queued, but not told the coordinator about.
        waiting = [handoff.request.room for handoff in orphans if handoff.waiting]
        self._prefill.cancel(waiting, "its decode engine was restarted")

    def _replace_coordinator(self, caught: list[Handoff]) -> None:
        """Kill the coordinator with handoffs in flight, start it again, and see all of them end."""
        coordinator = self._cluster.coordinator
        doomed = sum(1 for handoff in self._book.open.values() if handoff.outcome is None)
        self._tell(f"the coordinator is killed now (SIGKILL) with {doomed} handoffs in flight")
        self._times.coordinator_killed_s = time.monotonic()
        coordinator.kill()
        coordinator.start()
        # Said while it is away: they are handed over when it is back.
        self._submit([self._workload.ordinary() for _ in range(min(self._options.concurrency, self._left))])
        self._wait(lambda: not any(handoff.waiting for handoff in caught), "verdicts of the new coordinator")
        self._wait(lambda: self._times.recovered_s is not None, "a success with the new coordinator")
        since_s = self._times.since_coordinator_kill(self._times.recovered_s)
        self._tell(f"the first handoff with the new coordinator succeeded {since_s:.2f} s after the kill")

    def _tell_since_kill(self, what: str, now_s: float) -> None:
        self._tell(f"{what} {self._times.since_kill(now_s):.2f} s after the kill")

    def _submit(self, requests: list[Request]) -> None:
        self._left -= len(requests)
        self._cluster.hand_off(requests, self._prefill, self._decode)

    def _pause(self, duration_s: float) -> None:
        until_s = time.monotonic() + duration_s
        while (left_s := until_s - time.monotonic()) > 0:
            self._cluster.pump(left_s)
            self._observe()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def observing() -> bool:
            self._observe()
            return condition()

        self._cluster.wait_until(observing, self._options.settle_s, what, self._missing)

    def _missing(self) -> str:
        tail = self._cluster.coordinator.tail()
        return f"{len(self._book.open)} are open; the coordinator's last lines:\n{tail}"

    def _observe(self) -> None:
        """See what was settled since the last look."""
        for handoff in self._book.settled[self._seen :]:
            if not handoff.untold:
                self._workload.may_use_again(handoff.request)
            self._note_recovery(handoff)
            if handoff.outcome == "" and self._times.healed_s is None and handoff.decode.incarnation > 1:
                self._times.healed_s = handoff.settled_s
                self._tell_since_kill("the first handoff to it succeeded", time.monotonic())
        self._seen = len(self._book.settled)
        self._tick()

    def _note_recovery(self, handoff: Handoff) -> None:
        killed_s, settled_s = self._times.coordinator_killed_s, handoff.settled_s
        if killed_s is None or settled_s is None or self._times.recovered_s is not None:
            return
        if handoff.outcome == "" and settled_s > killed_s:
            self._times.recovered_s = settled_s

    def _without_success(self) -> list[str]:
        """Some handoff to the decode engine as it is now must have succeeded, or nothing was shown."""
        outcomes = {handoff.outcome for handoff in self._book.settled if handoff.decode == self._decode.party}
        if "" in outcomes:
            return []
        return [f"no handoff to {self._decode.party} has succeeded"]


def _begun(handoffs: list[Handoff]) -> bool:
    return all(handoff.in_flight or handoff.outcome is not None for handoff in handoffs)
