"""The storm with real processes: every rank, the coordinator and its workers; real pages, real SIGKILLs.

Broadcasts go through a proxy for each rank, which loses, doubles and delays them. Beside the lists of
outcomes, the simulated engines compare their allocators after every step, and every page is checked.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from coordinator.messages import Role
from coordinator.sim.cluster import Cluster
from coordinator.sim.options import ClusterOptions, small_layout
from coordinator.sim.workload import Workload
from tests.support.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.sim.child import Child
    from coordinator.sim.forks import ForkServer
    from coordinator.sim.group import EngineGroup
    from coordinator.sim.settings import RankSettings
    from tests.support.faults import Weather

PAIRS = (4, 2)
REQUESTS = 60
CONCURRENCY = 6
PATIENCE_S = 60.0

OPTIONS = ClusterOptions(
    layout=small_layout(max(PAIRS)),
    pages=128,
    coordinator={
        "rank": {"heartbeat_s": 0.2, "lost_after_s": 5.0, "reattach_s": 2.0},
        "release": {"settle_s": 0.5, "drain_s": 0.5},
    },
)


class StormyCluster(Cluster):
    """A deployment in which each rank has a line of its own, with weather of its own."""

    def __init__(self, options: ClusterOptions, forks: ForkServer, faults: Faults, seed: int) -> None:
        self.weathers: list[Weather[list[bytes]]] = []
        self._faults = faults
        self._seed = seed
        super().__init__(options, forks)

    def _start_rank(self, settings: RankSettings) -> Child:
        line = self._faults.line(self.coordinator.control, f"ipc://{self.directory}/outcomes")
        self.weathers.append(line.storm(f"{self._seed} {settings.label}"))
        return super()._start_rank(msgspec.structs.replace(settings, control=line.address))


class Router:
    """Gives requests to both pairs of engines."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.book = cluster.book
        self.groups: dict[int, tuple[EngineGroup, EngineGroup]] = {}
        self._random = Random(seed)
        self._workload = Workload(seed, cluster.options.pages)
        self._seen = 0

    def start(self) -> None:
        """Start all engines: those that receive when those that send are there, which they must fit."""
        prefill = {size: self.cluster.add(Role.PREFILL, f"prefill-{size}", size) for size in PAIRS}
        self.cluster.wait_ready()
        decode = {size: self.cluster.add(Role.DECODE, f"decode-{size}", size) for size in PAIRS}
        self.cluster.wait_ready()
        self.groups = {size: (prefill[size], decode[size]) for size in PAIRS}

    def feed(self, count: int) -> None:
        """Hand over so many requests, some at a time."""
        for _ in range(count):
            self.wait(lambda: len(self.book.open) < CONCURRENCY, "a handoff to be over")
            prefill, decode = self.groups[self._random.choice(PAIRS)]
            self.cluster.hand_off([self._workload.ordinary()], prefill, decode)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Pump until something holds."""
        self.cluster.wait_until(condition, PATIENCE_S, what, self._missing)
        for handoff in self.book.settled[self._seen :]:
            if not handoff.untold:
                self._workload.may_use_again(handoff.request)
        self._seen = len(self.book.settled)

    def restart(self, group: EngineGroup) -> None:
        """Kill one rank of a decode engine, which ends the engine, and start it anew."""
        group.kill(group.world_size - 1)
        group.restart()
        # What it had queued, and the coordinator had not heard of, is nobody's any more.
        orphans = [
            handoff
            for handoff in self.book.open.values()
            if handoff.decode.group == group.name and handoff.decode != group.party
        ]
        self.wait(lambda: group.is_ready, "the new engine to be ready")
        for handoff in orphans:
            if handoff.waiting:
                prefill = self.groups[group.world_size][0]
                prefill.cancel([handoff.request.room], "its decode engine was restarted")

    def explain(self, sentences: list[str]) -> str:
        """Say what the coordinators' logs have about the rooms that sentences are about, and about groups."""
        rooms = {
            word.rstrip(":") for sentence in sentences for word in sentence.split() if word[:1].isdigit()
        }
        lines = self.cluster.coordinator.log_path.read_text().splitlines()
        known = [line for line in lines if '"event":"group' in line or any(room in line for room in rooms)]
        return "\n".join([*sentences, *known])

    def _missing(self) -> str:
        open_ones = "\n".join(handoff.missing() for handoff in self.book.open.values())
        return f"{open_ones}\nthe coordinator's last lines:\n{self.cluster.coordinator.tail()}"


@pytest.mark.timeout(240)
def test_every_rank_process_applies_the_same_and_no_page_is_wrong(
    forks: ForkServer, process_chaos_seed: int
) -> None:
    """Cases C05 and C30."""
    seed = process_chaos_seed
    with Faults() as faults, StormyCluster(OPTIONS, forks, faults, seed) as cluster:
        router = Router(cluster, seed)
        router.start()
        router.feed(REQUESTS // 4)
        for _ in range(2):
            cluster.coordinator.kill()
            cluster.coordinator.start()
            router.feed(REQUESTS // 4)
        router.restart(router.groups[2][1])
        router.feed(REQUESTS // 4)
        router.wait(lambda: not cluster.book.open, "every handoff to be over on every rank")
        cluster.finish(PATIENCE_S)
        book = cluster.book
        assert book.disagreements == [], router.explain(book.disagreements)
        assert book.refusals == []
        assert sum(handoff.corrupt_pages for handoff in book.settled) == 0
        last = [state for states in book.finals.values() for state in states.values()]
        assert [(state.free_pages, state.held) for state in last] == [(OPTIONS.pages, [])] * 2 * sum(PAIRS)
        outcomes = [handoff.outcome for handoff in book.settled]
        assert outcomes.count("") > REQUESTS // 2
        assert set(outcomes) <= {"", "coordinator_restarted", "peer_lost", "cancelled_by_prefill"}
        assert all(
            sum(weather.met[fate] for weather in cluster.weathers) for fate in ("lost", "doubled", "late")
        )
