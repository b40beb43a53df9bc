"""From the last leg's end in a worker until all ranks hold the outcome, and until it is stable.

The ranks are engines that begin one handoff in each of their steps and sleep between them, as engines
do that compute: nobody waits for an outcome. A rank *holds* an outcome from the moment on in which
``drain()`` would return it. Rank 0's head *covers* it from the moment on in which ``drain(through=head)``
would. Both moments are noted in the client's own thread (``Ear``); that of the worker in its backend.

``bare_...`` is what ZeroMQ alone needs on this host, measured before and after: one message to as many
processes that do nothing else, and their answers. The targets were set on a host where that takes 0.37 ms
(0.9 ms for the 99th percentile) and 0.5 ms.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from coordinator.client import Outcome, PrefillRank
from coordinator.client.inbox import Head
from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support import stamped_loopback, yardsticks
from scripts.benches.support.deployment import Deployment, sleep_until

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from coordinator.client import DecodeRank
    from coordinator.messages import Broadcast
    from scripts.benches import Arguments, Target

TARGETS: Final[dict[str, Target]] = {
    "p50_ms": at_most(0.6),
    "p99_ms": at_most(2.0),
    "stable_p50_ms": at_most(0.9),
}

#: Prefill ranks, and as many decode ranks: 8 processes in all.
WORLD_SIZE: Final = 4
#: Handoffs at the start that do not count.
_WARM: Final = 50
#: An engine's step: long enough for one handoff to be alone.
_STEP_S: Final = 0.01
_END_S: Final = 30.0


class Plan(NamedTuple):
    """How many handoffs there are; room n is begun at ``begin_s + n * _STEP_S``, on the monotonic clock."""

    handoffs: int
    begin_s: float


class Moments(NamedTuple):
    """When a rank held each room's outcome, and when its head covered it; seconds, for room 1, 2 ..."""

    held_s: list[float]
    covered_s: list[float]


def run(arguments: Arguments) -> dict[str, float]:
    """Measure.

    Raises:
        SimulationError: a process failed.

    """
    handoffs = 200 if arguments.quick else 2000
    before = yardsticks.broadcast_ms(2 * WORLD_SIZE, handoffs // 2)
    ours = measure(WORLD_SIZE, handoffs)
    after = yardsticks.broadcast_ms(2 * WORLD_SIZE, handoffs // 2)
    held_ms, last_held_ms, answered_ms = np.mean([before, after], axis=0)
    return {
        **ours,
        "bare_p50_ms": float(held_ms),
        "bare_p99_ms": float(last_held_ms),
        "bare_answered_p50_ms": float(answered_ms),
    }


def measure(world_size: int, handoffs: int) -> dict[str, float]:
    """Measure with ``world_size`` ranks on each side."""
    with tempfile.TemporaryDirectory(prefix="kvc-stamps-") as directory:
        stamped_loopback.install(Path(directory))
        ranks = _hand_over(world_size, handoffs, Path(directory))
        # Page 0 is no room's.
        done_s = stamped_loopback.done_s(Path(directory))[1:]
    held_ms = _after(done_s, [rank.held_s for rank in ranks])
    # Rank 0 of the prefill group, and rank 0 of the decode group.
    covered_ms = _after(done_s, [ranks[0].covered_s, ranks[world_size].covered_s])
    return {
        "ranks": len(ranks),
        "p50_ms": float(np.percentile(held_ms, 50)),
        "p99_ms": float(np.percentile(held_ms, 99)),
        "stable_p50_ms": float(np.percentile(covered_ms, 50)),
    }


def _after(done_s: NDArray[np.float64], moments_s: list[list[float]]) -> NDArray[np.float64]:
    """From the worker's end to the last of the moments; milliseconds, for each handoff that counts."""
    last_s = np.array(moments_s).max(axis=0)
    return np.asarray(1e3 * (last_s - done_s)[_WARM:], np.float64)


def _hand_over(world_size: int, handoffs: int, directory: Path) -> list[Moments]:
    """Hand over all rooms; the moments of the prefill ranks, then of the decode ranks."""
    pages = handoffs + 1
    backend = stamped_loopback.NAME
    options = {stamped_loopback.DIRECTORY: str(directory), stamped_loopback.PAGES: pages}
    tables = {f"backend.options.{backend}": options}
    with Deployment(__name__, tables, backend=backend, import_from=directory) as deployment:
        ranks = [
            *deployment.start(Role.PREFILL, "prefill", world_size, pages=pages),
            *deployment.start(Role.DECODE, "decode", world_size, pages=pages),
        ]
        deployment.wait_ready()
        plan = Plan(handoffs, time.monotonic() + 1.0)
        for rank in ranks:
            rank.tell(plan)
        return [Moments(*rank.hear(handoffs * _STEP_S + _END_S)) for rank in ranks]


class Ear:
    """Notes, for each event by number, when a rank's client held it and when its head covered it."""

    def __init__(self, rank: PrefillRank | DecodeRank) -> None:
        """Listen in on the client, which must not have heard of any event yet."""
        self._conversation = rank._conversation  # noqa: SLF001 - there is no public way to be told of this moment
        self._inbox = self._conversation.inbox
        self._hear_broadcast = self._conversation.hear_broadcast
        self.held_s: list[float] = []
        self.covered_s: list[float] = []
        setattr(self._conversation, "hear_broadcast", self._hear)  # noqa: B010 - a method is replaced on purpose

    def _hear(self, broadcast: Broadcast, now_s: float) -> None:
        self._hear_broadcast(broadcast, now_s)
        moment_s = time.monotonic()
        self.held_s += [moment_s] * (self._inbox.have - len(self.held_s))
        self.covered_s += [moment_s] * (Head.unpack(self._inbox.token).number - len(self.covered_s))


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Begin a handoff in each step; tell when the outcomes came."""
    plan: Plan = driver.recv()
    ear = Ear(rank)
    numbers: dict[int, int] = {}
    drained = 0
    for step in range(1, plan.handoffs + round(_END_S / _STEP_S)):
        sleep_until(plan.begin_s + step * _STEP_S)
        if step <= plan.handoffs:
            # Room n has page n: so the worker's note of a page is about a room.
            say(rank, step)
        for event in rank.drain():
            drained += 1
            if isinstance(event, Outcome):
                numbers[event.room] = drained
        if len(numbers) == plan.handoffs and len(ear.covered_s) == drained:
            break
    rooms = [numbers[room] - 1 for room in range(1, plan.handoffs + 1)]
    driver.send(Moments([ear.held_s[room] for room in rooms], [ear.covered_s[room] for room in rooms]))
    driver.recv()


def say(rank: PrefillRank | DecodeRank, room: int) -> None:
    """Send or offer the room's one page."""
    if isinstance(rank, PrefillRank):
        rank.send(room, [room], last=True)
    else:
        rank.offer(room, [room])
