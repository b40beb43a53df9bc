"""How late a deadline is told: one by one, and when all of them pass in one instant.

``bare_...`` are the same for as many tasks with a time-out on this host that do and tell nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import zmq

from coordinator.client import Outcome, Reason
from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support import yardsticks
from scripts.benches.support.deployment import Deployment, sleep_until
from scripts.benches.support.waiting import PAGES, barrier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from coordinator.client import PrefillRank
    from coordinator.messages import Event
    from scripts.benches import Arguments, Target

TARGETS: Final[dict[str, Target]] = {"p99_late_ms": at_most(5), "all_at_once_s": at_most(0.5)}

_WORLD_SIZE: Final = 2
_PATIENCE_S: Final = 60.0
#: The coordinator stands still from so long before the first deadline until so long after the last.
_MARGIN_S: Final = 0.2


class Plan(NamedTuple):
    """What a rank does: complete prefill of rooms 1, 2 ... ``rooms``, room i at ``begin_s + i * pace_s``."""

    rooms: int
    begin_s: float
    pace_s: float


class Times(NamedTuple):
    """When a rank has said and seen each room, in order of the rooms; monotonic seconds."""

    said_s: list[float]
    seen_s: list[float]


def run(arguments: Arguments) -> dict[str, float]:
    """Measure.

    Raises:
        SimulationError: a process failed, or an outcome is not what it must be.

    """
    inflight = 1000 if arguments.quick else 10_000
    spread_s = 2.0 if arguments.quick else 10.0
    return {
        "inflight": inflight,
        "p99_late_ms": 1e3 * _late_s(inflight, spread_s),
        "all_at_once_s": _all_at_once_s(inflight),
        "bare_p99_late_ms": yardsticks.lateness_ms(inflight, spread_s),
        "bare_all_at_once_s": yardsticks.expiries_s(inflight),
    }


def _late_s(inflight: int, spread_s: float) -> float:
    """99th percentile over all rooms and ranks, from the first rank's call on."""
    # All are in flight before the first one expires.
    deadline_s = spread_s + 2.0
    with _deployment(deadline_s) as deployment:
        ranks = deployment.start(Role.PREFILL, "prefill", _WORLD_SIZE, pages=PAGES)
        deployment.wait_ready()
        plan = Plan(inflight, time.monotonic() + 0.5, spread_s / inflight)
        for rank in ranks:
            rank.tell(plan)
        for rank in ranks:
            rank.hear(_PATIENCE_S)
        times = [Times(*rank.hear(_PATIENCE_S)) for rank in ranks]
    first_said_s = np.min([rank.said_s for rank in times], axis=0)
    seen_s = np.array([rank.seen_s for rank in times])
    return float(np.percentile(seen_s - first_said_s - deadline_s, 99))


def _all_at_once_s(inflight: int) -> float:
    """From one instant in which all are overdue until every rank has every outcome."""
    deadline_s = 5.0
    with _deployment(deadline_s) as deployment:
        ranks = deployment.start(Role.PREFILL, "prefill", _WORLD_SIZE, pages=PAGES)
        deployment.wait_ready()
        plan = Plan(inflight, time.monotonic() + 0.1, 0.0)
        for rank in ranks:
            rank.tell(plan)
        said_s, known_s = zip(*(rank.hear(_PATIENCE_S) for rank in ranks), strict=True)
        sleep_until(min(said_s) + deadline_s - _MARGIN_S)
        deployment.coordinator.stop()
        sleep_until(max(known_s) + deadline_s + _MARGIN_S)
        began_s = time.monotonic()
        deployment.coordinator.cont()
        seen_s = [max(Times(*rank.hear(_PATIENCE_S)).seen_s) for rank in ranks]
    return max(seen_s) - began_s


def _deployment(deadline_s: float) -> Deployment:
    # A coordinator that stands still must not take its ranks for dead afterwards.
    return Deployment(__name__, {"handoff": {"deadline_s": deadline_s}, "rank": {"lost_after_s": 60.0}})


def engine(rank: PrefillRank, driver: Connection) -> None:
    """Complete the rooms, each in its time, and note when each one's outcome is seen."""
    plan: Plan = driver.recv()
    pages = np.arange(PAGES, dtype=np.int32)
    poller = zmq.Poller()
    poller.register(rank.fileno(), zmq.POLLIN)
    said_s: list[float] = []
    seen_s: dict[int, float] = {}
    while len(said_s) < plan.rooms:
        left_s = plan.begin_s + len(said_s) * plan.pace_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        said_s.append(time.monotonic())
        rank.send(len(said_s), pages, last=True)
    events: Sequence[Event] = barrier(rank)
    driver.send((said_s[0], time.monotonic()))
    while True:
        _note(events, seen_s)
        if len(seen_s) == plan.rooms:
            break
        poller.poll(1000)
        events = rank.drain()
    driver.send(Times(said_s, [seen_s[room] for room in range(1, plan.rooms + 1)]))
    driver.recv()


def _note(events: Sequence[Event], seen_s: dict[int, float]) -> None:
    now_s = time.monotonic()
    for event in events:
        if not isinstance(event, Outcome) or event.room in seen_s:
            continue
        if event.failure is None:
            message = f"room {event.room} has succeeded without any decode"
            raise RuntimeError(message)
        if event.failure.reason is Reason.DEADLINE:
            seen_s[event.room] = now_s
