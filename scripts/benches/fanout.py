"""From the last leg's end in a worker until all ranks hold the outcome, and until it is stable.

The ranks are simple engines that sleep until their client has news. An outcome is *held* when the
engine's own thread has drained it; it is *covered* when ``drain(through=head)`` returns it. The
handoffs take turns: in every second one all ranks note the first, in the others rank 0 of both
groups notes the second.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import zmq

from coordinator.client import Outcome, PrefillRank
from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support import stamped_loopback
from scripts.benches.support.deployment import Deployment

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from coordinator.client import DecodeRank
    from scripts.benches import Arguments, Target

TARGETS: Final[dict[str, Target]] = {
    "p50_ms": at_most(0.6),
    "p99_ms": at_most(2.0),
    "stable_p50_ms": at_most(0.9),
}

#: Prefill ranks, and as many decode ranks.
WORLD_SIZE: Final = 4
#: Handoffs at the start that do not count.
_WARM: Final = 50
#: Quiet time before each handoff: one is alone.
_GAP_S: Final = 0.005
_PATIENCE_S: Final = 120.0


class Plan(NamedTuple):
    """Which rank of which group one is, and how many handoffs there are."""

    rank: int
    handoffs: int


def run(arguments: Arguments) -> dict[str, float]:
    """Measure.

    Raises:
        SimulationError: a process failed.

    """
    return measure(WORLD_SIZE, 300 if arguments.quick else 2000)


def measure(world_size: int, handoffs: int) -> dict[str, float]:
    """Measure with ``world_size`` ranks on each side."""
    with tempfile.TemporaryDirectory(prefix="kvc-stamps-") as directory:
        stamped_loopback.install(Path(directory))
        seen_s = _hand_over(world_size, handoffs, Path(directory))
        done_s = stamped_loopback.done_s(Path(directory))
    # Page 0 is for no room; a rank that did not note a handoff has NaN there.
    late_ms = 1e3 * (seen_s - done_s)[:, 1 + _WARM :]
    numbers = np.arange(1 + _WARM, handoffs + 1)
    held_ms = np.max(late_ms[:, numbers % 2 == 1], axis=0)
    covered_ms = np.nanmax(late_ms[:, numbers % 2 == 0], axis=0)
    return {
        "ranks": len(seen_s),
        "p50_ms": float(np.percentile(held_ms, 50)),
        "p99_ms": float(np.percentile(held_ms, 99)),
        "stable_p50_ms": float(np.percentile(covered_ms, 50)),
    }


def _hand_over(
    world_size: int, handoffs: int, directory: Path
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Hand over room 1, 2 ... one by one; when each rank saw each room, shape (ranks, rooms + 1)."""
    pages = handoffs + 1
    tables = {
        f"backend.options.{stamped_loopback.NAME}": {
            stamped_loopback.DIRECTORY: str(directory),
            stamped_loopback.PAGES: pages,
        }
    }
    backend = stamped_loopback.NAME
    with Deployment(__name__, tables, backend=backend, import_from=directory) as deployment:
        ranks = [
            *deployment.start(Role.PREFILL, "prefill", world_size, pages=pages),
            *deployment.start(Role.DECODE, "decode", world_size, pages=pages),
        ]
        deployment.wait_ready()
        for number, rank in enumerate(ranks):
            rank.tell(Plan(number % world_size, handoffs))
        return np.array([rank.hear(_PATIENCE_S) for rank in ranks])


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Hand over the rooms, one after the other; tell when each one was seen."""
    plan: Plan = driver.recv()
    poller = zmq.Poller()
    poller.register(rank.fileno(), zmq.POLLIN)
    seen_s = [np.nan]
    for room in range(1, plan.handoffs + 1):
        time.sleep(_GAP_S)
        # Room n has page n: so the worker's note of a page is about a room.
        if isinstance(rank, PrefillRank):
            rank.send(room, [room], last=True)
        else:
            rank.offer(room, [room])
        covered = room % 2 == 0
        noted = not covered or plan.rank == 0
        moment_s = _await(rank, poller, room, covered=covered and noted)
        seen_s.append(moment_s if noted else np.nan)
    driver.send(seen_s)
    driver.recv()


def _await(rank: PrefillRank | DecodeRank, poller: zmq.Poller, room: int, *, covered: bool) -> float:
    """Sleep until the outcome is there; return when it was."""
    while True:
        poller.poll(1000)
        for event in rank.drain(through=rank.head) if covered else rank.drain():
            if isinstance(event, Outcome) and event.room == room:
                moment_s = time.monotonic()
                if event.failure is not None:
                    message = f"room {room} has failed: {event.failure}"
                    raise RuntimeError(message)
                return moment_s
