"""Handoffs a second, everything on two cores, and what each costs the coordinator.

The ranks' and the workers' CPU time are those of all 16 and 8 of them together: with the coordinator's
they are what the two cores have to do. ``bare_task_us`` is the CPU time of one task with a time-out on this
host that does nothing else.
"""

from __future__ import annotations

import select
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from coordinator.client import DecodeRank, Outcome, PrefillRank
from coordinator.messages import Role
from coordinator.sim.proc import children
from scripts.benches import at_least, at_most
from scripts.benches.support import yardsticks
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.process_cost import cpu_s, two_cores

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from scripts.benches import Arguments, Target

TARGETS: Final[dict[str, Target]] = {
    "tp1_per_s": at_least(3000),
    "tp8_per_s": at_least(500),
    "tp8_coordinator_cpu_us": at_most(400),
}

#: Pages of a handoff.
PAGES: Final = 4
#: Handoffs that each rank has begun and not got back.
TP1_WINDOW: Final = 256
TP8_WINDOW: Final = 64
#: An engine's scheduler step; the fastest real ones take some milliseconds.
STEP_MS: Final = 5
_ANSWER_S: Final = 30.0


class Sample(NamedTuple):
    """How far the handoffs are: how many have succeeded so far, by when; monotonic seconds."""

    succeeded: int
    at_s: float


class Cost(NamedTuple):
    """Handoffs a second, and CPU microseconds of each in the coordinator, all ranks, and all workers."""

    per_s: float
    coordinator_us: float
    ranks_us: float
    workers_us: float


def run(arguments: Arguments) -> dict[str, float]:
    """Measure.

    Raises:
        SimulationError: a process failed.

    """
    warm_s, measured_s = (1.0, 2.0) if arguments.quick else (3.0, 10.0)
    with two_cores():
        tp1 = measure(1, TP1_WINDOW, warm_s, measured_s)
        tp8 = measure(8, TP8_WINDOW, warm_s, measured_s)
        bare_task_us = yardsticks.task_us()
    return {
        "tp1_per_s": tp1.per_s,
        "tp8_per_s": tp8.per_s,
        "tp8_coordinator_cpu_us": tp8.coordinator_us,
        "tp8_ranks_cpu_us": tp8.ranks_us,
        "tp8_workers_cpu_us": tp8.workers_us,
        "bare_task_us": bare_task_us,
    }


def measure(world_size: int, window: int, warm_s: float, measured_s: float) -> Cost:
    """Measure handoffs between ``world_size`` ranks on each side."""
    with Deployment(__name__, {}) as deployment:
        prefill = deployment.start(Role.PREFILL, "prefill", world_size, pages=window * PAGES)
        decode = deployment.start(Role.DECODE, "decode", world_size, pages=window * PAGES)
        deployment.wait_ready()
        for rank in (*prefill, *decode):
            rank.tell(window)
        coordinator = deployment.coordinator.pid
        kinds = (
            [coordinator],
            [rank.child.pid for rank in (*prefill, *decode)],
            children(coordinator),
        )
        samples = []
        for pause_s in (warm_s, measured_s):
            time.sleep(pause_s)
            decode[0].tell("how far?")
            so_far = Sample(*decode[0].hear(_ANSWER_S))
            samples.append((so_far, [sum(map(cpu_s, pids)) for pids in kinds]))
    (first, before_s), (last, after_s) = samples
    handoffs = last.succeeded - first.succeeded
    spent_us = [1e6 * (after - before) / handoffs for before, after in zip(before_s, after_s, strict=True)]
    return Cost(handoffs / (last.at_s - first.at_s), *spent_us)


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Hand over room after room, as many at a time as there are pages, until the driver hangs up."""
    window = driver.recv()
    say = partial(rank.send, last=True) if isinstance(rank, PrefillRank) else rank.offer
    free = deque(np.arange(slot * PAGES, (slot + 1) * PAGES, dtype=np.int32) for slot in range(window))
    held: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
    orders = select.poll()
    orders.register(driver, select.POLLIN)
    room = succeeded = 0
    while True:
        while free:
            # All ranks take the rooms in the same order: 1, 2, 3 ...
            room += 1
            held[room] = free.popleft()
            say(room, held[room])
        # A step of the engine; and here the driver is heard.
        if orders.poll(STEP_MS):
            driver.recv()
            driver.send(Sample(succeeded, time.monotonic()))
        for event in rank.drain():
            if not isinstance(event, Outcome):
                free.append(held.pop(event.room))
            elif event.failure is None:
                succeeded += 1
            else:
                message = f"room {event.room} has failed: {event.failure}"
                raise RuntimeError(message)
