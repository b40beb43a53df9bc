"""How much memory a handoff takes in the coordinator while it waits for decode."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from coordinator.messages import Role
from scripts.benches import at_most
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.process_cost import rss_bytes
from scripts.benches.support.waiting import PAGES, complete

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from coordinator.client import PrefillRank
    from scripts.benches import Arguments, Target
    from scripts.benches.support.deployment import Tables

TARGETS: Final[dict[str, Target]] = {"bytes_per_handoff": at_most(8192)}

_TABLES: Final[Tables] = {
    "handoff": {"deadline_s": 3600.0, "hard_cap_s": 3600.0},
    "limits": {"max_handoffs": 200_000},
}
_FILL_S: Final = 180.0
#: For what is queued, as lines of the log are, to be gone.
_SETTLE_S: Final = 1.0


def run(arguments: Arguments) -> dict[str, float]:
    """Measure; the handoffs have a prompt of ``PAGES`` pages on one rank.

    Raises:
        SimulationError: a process failed.

    """
    inflight = 10_000 if arguments.quick else 100_000
    with Deployment(__name__, _TABLES) as deployment:
        (rank,) = deployment.start(Role.PREFILL, "prefill", 1, pages=PAGES)
        deployment.wait_ready()
        time.sleep(_SETTLE_S)
        pid = deployment.coordinator.pid
        before = rss_bytes(pid)
        rank.tell(inflight)
        rank.hear(_FILL_S)
        time.sleep(_SETTLE_S)
        after = rss_bytes(pid)
    return {"inflight": inflight, "bytes_per_handoff": (after - before) / inflight}


def engine(rank: PrefillRank, driver: Connection) -> None:
    """Let the rooms wait until the driver has looked."""
    complete(rank, range(1, driver.recv() + 1))
    driver.send("waiting")
    driver.recv()
