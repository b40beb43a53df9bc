"""What ``drain()`` costs an engine in every scheduler step in which nothing is new.

Two engines, one with a single request in flight and one with 10,000, are measured in turn; ``ratio`` is
that of many to few over the pairs of turns.
"""

from __future__ import annotations

import timeit
from typing import TYPE_CHECKING, Final

from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.pairs import ratio
from scripts.benches.support.waiting import PAGES, complete

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from coordinator.client import PrefillRank
    from scripts.benches import Arguments, Target
    from scripts.benches.support.deployment import RankHandle, Tables

TARGETS: Final[dict[str, Target]] = {
    "idle_ns_inflight_1": at_most(500),
    "idle_ns_inflight_10000": at_most(500),
}

#: The rooms of each engine; no room is on two of them.
ROOMS: Final = {"few": range(1, 2), "many": range(2, 10_002)}
_TURNS: Final = 7
_FILL_S: Final = 120.0
_TABLES: Final[Tables] = {"handoff": {"deadline_s": 3600.0, "hard_cap_s": 3600.0}}


def run(arguments: Arguments) -> dict[str, float]:
    """Measure; in nanoseconds a call, the fastest turn of each: the others tell how busy the host was.

    Raises:
        SimulationError: a process failed.

    """
    calls = 10_000 if arguments.quick else 100_000
    with Deployment(__name__, _TABLES) as deployment:
        ranks = [deployment.start(Role.PREFILL, name, 1, pages=PAGES)[0] for name in ROOMS]
        deployment.wait_ready()
        for rank, rooms in zip(ranks, ROOMS.values(), strict=True):
            rank.tell(rooms)
            rank.hear(_FILL_S)
        turns = [_turn(ranks, calls) for _ in range(_TURNS)]
    few_ns, many_ns = (min(figures) for figures in zip(*turns, strict=True))
    return {
        "idle_ns_inflight_1": few_ns,
        "idle_ns_inflight_10000": many_ns,
        **ratio((many, few) for few, many in turns),
    }


def _turn(ranks: list[RankHandle], calls: int) -> tuple[float, float]:
    """One measurement of each, one after the other."""
    figures: list[float] = []
    for rank in ranks:
        rank.tell(calls)
        figures.append(rank.hear(_FILL_S))
    few_ns, many_ns = figures
    return few_ns, many_ns


def engine(rank: PrefillRank, driver: Connection) -> None:
    """Measure in the engine's own thread, where it matters."""
    complete(rank, driver.recv())
    # What the coordinator still has to say about the rooms before is not nothing.
    while rank.wait(1.0):
        rank.drain()
    driver.send("waiting")
    while True:
        driver.send(_idle_ns(rank, driver.recv()))


def _idle_ns(rank: PrefillRank, calls: int) -> float:
    """Time both ways of asking for nothing new; return the slower one's time."""
    drain, head = rank.drain, rank.head
    plain_s = timeit.repeat(drain, number=calls, repeat=3)
    drain(through=head)
    lockstep_s = timeit.repeat(
        "drain(through=head)", globals={"drain": drain, "head": head}, number=calls, repeat=3
    )
    return max(min(plain_s), min(lockstep_s)) / calls * 1e9
