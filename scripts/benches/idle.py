"""What the coordinator costs while nothing happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from coordinator.client import PrefillRank
from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.process_cost import cpu_s
from scripts.benches.support.waiting import PAGES, complete

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from coordinator.client import DecodeRank
    from scripts.benches import Arguments, Target
    from scripts.benches.support.deployment import Tables

TARGETS: Final[dict[str, Target]] = {"cpu_percent": at_most(0.5)}

_WORLD_SIZE: Final = 2
_INFLIGHT: Final = 10_000
_TABLES: Final[Tables] = {"handoff": {"deadline_s": 3600.0, "hard_cap_s": 3600.0}}
_FILL_S: Final = 120.0
_SETTLE_S: Final = 2.0


def run(arguments: Arguments) -> dict[str, float]:
    """Measure; 2 prefill and 2 decode ranks, with their 2 workers, give their signs of life meanwhile.

    Raises:
        SimulationError: a process failed.

    """
    measured_s = 3.0 if arguments.quick else 10.0
    with Deployment(__name__, _TABLES) as deployment:
        prefill = deployment.start(Role.PREFILL, "prefill", _WORLD_SIZE, pages=PAGES)
        decode = deployment.start(Role.DECODE, "decode", _WORLD_SIZE, pages=PAGES)
        deployment.wait_ready()
        for rank in (*prefill, *decode):
            rank.tell(_INFLIGHT)
        for rank in prefill:
            rank.hear(_FILL_S)
        time.sleep(_SETTLE_S)
        pid = deployment.coordinator.pid
        began_s, before_s = time.monotonic(), cpu_s(pid)
        time.sleep(measured_s)
        spent_s, passed_s = cpu_s(pid) - before_s, time.monotonic() - began_s
    return {"inflight": _INFLIGHT, "cpu_percent": 100 * spent_s / passed_s}


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Let the rooms wait until the driver has looked."""
    inflight = driver.recv()
    if isinstance(rank, PrefillRank):
        complete(rank, range(1, inflight + 1))
        driver.send("waiting")
    driver.recv()
