"""After SIGKILL of a decode engine: until every prefill rank knows, and has its pages back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from coordinator.client import Outcome, PrefillRank, Reason
from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.waiting import barrier

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from coordinator.client import DecodeRank
    from scripts.benches import Arguments, Target
    from scripts.benches.support.deployment import RankHandle, Tables

TARGETS: Final[dict[str, Target]] = {"failed_everywhere_s": at_most(0.5), "released_s": at_most(2.5)}

WORLD_SIZE: Final = 2
HANDOFFS: Final = 64
PAGES: Final = 16
_PATIENCE_S: Final = 60.0
#: For the workers to have begun with what they were told.
_SETTLE_S: Final = 0.5
#: Every write is so slow that none ends by itself: a handoff has 2 KiB a rank. (An array of tables.)
_TABLES: Final[Tables] = {"[backend.options.loopback.faults]": {"kind": "slow", "bytes_per_s": 10.0}}


class Healed(NamedTuple):
    """When a rank had the last outcome, and the last release; monotonic seconds."""

    failed_s: float
    released_s: float


def run(arguments: Arguments) -> dict[str, float]:
    """Measure; the slowest of some times counts.

    Raises:
        SimulationError: a process failed.

    """
    times = 1 if arguments.quick else 5
    with Deployment(__name__, _TABLES) as deployment:
        pages = HANDOFFS * PAGES
        prefill = deployment.start(Role.PREFILL, "prefill", WORLD_SIZE, pages=pages)
        healed = []
        for time_ in range(times):
            decode = deployment.start(Role.DECODE, "decode", WORLD_SIZE, pages=pages)
            deployment.wait_ready()
            _begin(prefill, decode, first_room=1 + time_ * HANDOFFS)
            deployment.wait_for_log("handoff.moving", HANDOFFS * (time_ + 1))
            healed.append(_kill(prefill, decode))
    return {
        "failed_everywhere_s": max(failed_s for failed_s, _ in healed),
        "released_s": max(released_s for _, released_s in healed),
    }


def _begin(prefill: list[RankHandle], decode: list[RankHandle], first_room: int) -> None:
    """Have all ranks begin handoffs; return when the coordinator has heard all of it."""
    for rank in (*decode, *prefill):
        rank.tell(first_room)
    for rank in (*decode, *prefill):
        rank.hear(_PATIENCE_S)


def _kill(prefill: list[RankHandle], decode: list[RankHandle]) -> tuple[float, float]:
    """Kill decode in the middle of its handoffs; return how long prefill took to be whole again."""
    time.sleep(_SETTLE_S)
    killed_s = time.monotonic()
    for rank in decode:
        rank.kill()
    healed = [Healed(*rank.hear(_PATIENCE_S)) for rank in prefill]
    for rank in decode:
        rank.end()
    return max(rank.failed_s for rank in healed) - killed_s, max(
        rank.released_s for rank in healed
    ) - killed_s


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Begin the handoffs, as often as the driver says; prefill tells how they end."""
    while True:
        first_room = driver.recv()
        rooms = range(first_room, first_room + HANDOFFS)
        for slot, room in enumerate(rooms):
            pages = np.arange(slot * PAGES, (slot + 1) * PAGES, dtype=np.int32)
            if isinstance(rank, PrefillRank):
                rank.send(room, pages, last=True)
            else:
                rank.offer(room, pages)
        barrier(rank)
        driver.send("begun")
        if isinstance(rank, PrefillRank):
            driver.send(_await_end(rank, set(rooms)))


def _await_end(rank: PrefillRank, rooms: set[int]) -> Healed:
    """Wait until every room has failed and is released."""
    unfailed, held = set(rooms), set(rooms)
    failed_s = 0.0
    while held:
        rank.wait(1.0)
        for event in rank.drain():
            if not isinstance(event, Outcome):
                held.discard(event.room)
            elif event.room in unfailed:
                _check(event)
                unfailed.discard(event.room)
                failed_s = time.monotonic()
    return Healed(failed_s, time.monotonic())


def _check(outcome: Outcome) -> None:
    """Raise RuntimeError unless it failed as it must."""
    if outcome.failure is None or outcome.failure.reason is not Reason.PEER_LOST:
        message = f"room {outcome.room} must have failed as peer_lost: {outcome}"
        raise RuntimeError(message)
