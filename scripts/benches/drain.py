"""What ``drain()`` costs an engine in every scheduler step in which nothing is new."""

from __future__ import annotations

import timeit
from typing import TYPE_CHECKING, Final

from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.waiting import PAGES, complete

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from coordinator.client import PrefillRank
    from scripts.benches import Arguments, Target
    from scripts.benches.support.deployment import Tables

TARGETS: Final[dict[str, Target]] = {
    "idle_ns_inflight_1": at_most(500),
    "idle_ns_inflight_10000": at_most(500),
}

_FEW: Final = 1
_MANY: Final = 10_000
_TABLES: Final[Tables] = {"handoff": {"deadline_s": 3600.0, "hard_cap_s": 3600.0}}


def run(arguments: Arguments) -> dict[str, float]:
    """Measure; in nanoseconds a call.

    Raises:
        SimulationError: a process failed.

    """
    calls = 50_000 if arguments.quick else 500_000
    with Deployment(__name__, _TABLES) as deployment:
        (rank,) = deployment.start(Role.PREFILL, "prefill", 1, pages=PAGES)
        deployment.wait_ready()
        rank.tell(calls)
        few_ns, many_ns = rank.hear(timeout_s=120)
    return {"idle_ns_inflight_1": few_ns, "idle_ns_inflight_10000": many_ns}


def engine(rank: PrefillRank, driver: Connection) -> None:
    """Measure in the engine's own thread, where it matters."""
    calls = driver.recv()
    complete(rank, range(1, _FEW + 1))
    few_ns = _idle_ns(rank, calls)
    complete(rank, range(_FEW + 1, _MANY + 1))
    driver.send((few_ns, _idle_ns(rank, calls)))
    driver.recv()


def _idle_ns(rank: PrefillRank, calls: int) -> float:
    """Time both ways of asking for nothing new; return the slower one's time."""
    drain = rank.drain
    # What the coordinator still has to say about the rooms before is not nothing.
    while rank.wait(1.0):
        drain()
    plain_s = timeit.repeat(drain, number=calls, repeat=5)
    head = rank.head
    drain(through=head)
    lockstep_s = timeit.repeat("drain(through=head)", globals={"drain": drain, "head": head}, number=calls)
    # The fastest round is what the call costs; the others tell how busy the host was.
    return max(min(plain_s), min(lockstep_s)) / calls * 1e9
