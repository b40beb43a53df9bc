"""Many handoffs, one in ten failing, decode restarting: is anything left, does the memory grow."""

from __future__ import annotations

import select
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from coordinator.client import Outcome, PrefillRank
from coordinator.commands.caller import Caller
from coordinator.messages import Role
from coordinator.sim.errors import SimulationError
from scripts.benches import at_most
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.process_cost import rss_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection

    from coordinator.client import DecodeRank
    from scripts.benches import Arguments, Target
    from scripts.benches.support.deployment import RankHandle, Tables

TARGETS: Final[dict[str, Target]] = {"residual": at_most(0), "rss_growth_percent": at_most(2)}

_WORLD_SIZE: Final = 2
_PAGES: Final = 4
#: Rooms that each rank has begun and not got back.
_WINDOW: Final = 128
_STEP_MS: Final = 5
#: One room in so many is given up, in turn by decode and by prefill.
_GIVEN_UP: Final = 10
#: How often decode is killed and started again, spread over the run.
_RESTARTS: Final = 3
_TABLES: Final[Tables] = {
    "handoff": {"deadline_s": 10.0, "offer_ttl_s": 20.0},
    "release": {"drain_s": 0.2},
    "http": {"address": "127.0.0.1:0"},
    "log": {"format": "json", "level": "info"},
}
#: Before its memory is looked at, the coordinator remembers as many ended rooms as it ever does.
_WARM: Final = 20_000
_LOOK_S: Final = 0.25
#: Without any progress for so long, the run has failed.
_STUCK_S: Final = 60.0
_ANSWER_S: Final = 30.0
#: For the last pages to be quiet, and the last events to be acknowledged.
_REST_S: Final = 30.0
#: What must be nothing when nothing is in flight.
_LEFT: Final = (
    "handoffs_in_flight",
    "handoffs_unreleased",
    "quarantined_handoffs",
    "quarantined_bytes",
    "moves_in_flight",
    "broadcast_kept_events",
)


def run(arguments: Arguments) -> dict[str, float]:
    """Measure; both engines have two ranks. Memory is looked at after a warm-up.

    A quick run is over before the coordinator remembers as much as it ever does: it says nothing of memory.

    Raises:
        SimulationError: a process failed, or nothing goes on.

    """
    warm, handoffs = (1_000, 4_000) if arguments.quick else (_WARM, 200_000)
    with Deployment(__name__, _TABLES) as deployment:
        url = deployment.url()
        prefill = deployment.start(Role.PREFILL, "prefill", _WORLD_SIZE, pages=_WINDOW * _PAGES)
        decode = _start_decode(deployment)
        deployment.wait_ready()
        watch = _Watch(Caller(url), deployment.coordinator.pid, warm, handoffs)
        _quieten(deployment, watch)
        _tell((*prefill, *decode), (1, warm + handoffs))
        began_s = time.monotonic()
        for number in range(1, _RESTARTS + 1):
            watch.until(warm + number * handoffs // (_RESTARTS + 1))
            decode = _start_decode(deployment, decode)
            deployment.wait_ready()
            _tell(decode, (_begun(prefill) + 1, warm + handoffs))
        watch.until(warm + handoffs)
        took_s = time.monotonic() - began_s
        residual = watch.residual()
        status = watch.status()
    failed = sum(status["failed"].values())
    figures = {
        "handoffs": status["opened"],
        "failed": failed,
        "per_s": status["opened"] / took_s,
        "residual": residual + abs(status["opened"] - status["succeeded"] - failed),
    }
    if not arguments.quick:
        figures |= {
            "first_tenth_mib": watch.first_bytes / 2**20,
            "last_tenth_mib": watch.last_bytes / 2**20,
            "rss_growth_percent": 100 * (watch.last_bytes / watch.first_bytes - 1),
        }
    return figures


class _Watch:
    """Looks at the coordinator while it works.

    Attributes:
        first_bytes, last_bytes: the most memory that it had in the first and in the last tenth of the run.

    """

    def __init__(self, caller: Caller, pid: int, warm: int, handoffs: int) -> None:
        self.caller = caller
        self.first_bytes = self.last_bytes = 0
        self._pid = pid
        self._warm = warm
        self._handoffs = handoffs

    def status(self) -> dict[str, Any]:
        """Ask for the coordinator at a glance."""
        return dict(self.caller.get("/v1/status"))

    def until(self, handoffs: int) -> None:
        """Wait until so many handoffs have been opened, and all of them when those are all there are."""
        done, moved_s = -1, time.monotonic()
        while True:
            status = self.status()
            opened, in_flight = status["opened"], sum(status["in_flight"].values())
            self._weigh((opened - self._warm) / self._handoffs)
            if opened >= handoffs and (handoffs < self._warm + self._handoffs or not in_flight):
                return
            if opened - in_flight != done:
                done, moved_s = opened - in_flight, time.monotonic()
            elif time.monotonic() - moved_s > _STUCK_S:
                message = f"nothing has ended for {_STUCK_S:g} s: {status}"
                raise SimulationError(message)
            time.sleep(_LOOK_S)

    def _weigh(self, part: float) -> None:
        now_bytes = rss_bytes(self._pid)
        if 0 <= part <= 0.1:  # noqa: PLR2004 - a tenth
            self.first_bytes = max(self.first_bytes, now_bytes)
        elif part >= 0.9:  # noqa: PLR2004 - as above
            self.last_bytes = max(self.last_bytes, now_bytes)

    def residual(self) -> float:
        """Wait for what is on its way to end; return how much is left of everything."""
        end_s = time.monotonic() + _REST_S
        while (left := self._left()) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        return left

    def _left(self) -> float:
        total = 0.0
        unseen = set(_LEFT)
        for line in self.caller.lines("/metrics"):
            name, _, value = line.rpartition(" ")
            metric = name.partition("{")[0].removeprefix("kv_coordinator_")
            if metric in _LEFT:
                total += float(value)
                unseen.discard(metric)
        if unseen:
            message = f"the coordinator has no metric {', '.join(sorted(unseen))}"
            raise SimulationError(message)
        return total


def _quieten(deployment: Deployment, watch: _Watch) -> None:
    """Have no line written for every step of every handoff: there are millions."""
    file = deployment.coordinator.config_path
    file.write_text(file.read_text().replace('level = "info"', 'level = "warning"'))
    watch.caller.post("/v1/reload")


def _start_decode(deployment: Deployment, former: Iterable[RankHandle] = ()) -> list[RankHandle]:
    """Start a decode engine, in the place of a former one, which is killed."""
    for rank in former:
        rank.kill()
    for rank in former:
        rank.end()
    return deployment.start(Role.DECODE, "decode", _WORLD_SIZE, pages=_WINDOW * _PAGES)


def _tell(ranks: Iterable[RankHandle], rooms: tuple[int, int]) -> None:
    for rank in ranks:
        rank.tell(rooms)


def _begun(prefill: Iterable[RankHandle]) -> int:
    """Ask up to which room prefill has begun."""
    found: list[int] = []
    for rank in prefill:
        rank.tell("how far?")
        found.append(rank.hear(_ANSWER_S))
    return max(found)


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Hand over the rooms that the driver names, as many at a time as there are pages."""
    room, last = driver.recv()
    room -= 1
    free = deque(np.arange(slot * _PAGES, (slot + 1) * _PAGES, dtype=np.int32) for slot in range(_WINDOW))
    held: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
    # Rooms that have failed before this rank began them: nothing is to be said of those.
    over: set[int] = set()
    orders = select.poll()
    orders.register(driver, select.POLLIN)
    while True:
        while free and room < last:
            # All ranks take the rooms in the same order: 1, 2, 3 ...
            room += 1
            if room in over:
                over.remove(room)
                continue
            held[room] = free.popleft()
            _say(rank, room, held[room])
        if orders.poll(_STEP_MS):
            driver.recv()
            driver.send(room)
        for event in rank.drain():
            if event.room > room:
                over.add(event.room)
            elif not isinstance(event, Outcome) and event.room in held:
                free.append(held.pop(event.room))


def _say(
    rank: PrefillRank | DecodeRank, room: int, pages: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> None:
    """Give the pages of a room; some are given up, by all ranks of decode or of prefill."""
    gives_up = room % _GIVEN_UP == 0
    if isinstance(rank, PrefillRank):
        by_prefill = gives_up and room % (2 * _GIVEN_UP) == 0
        rank.send(room, pages, last=not by_prefill)
        if by_prefill:
            rank.cancel(room, "given up by prefill")
    else:
        rank.offer(room, pages)
        if gives_up and room % (2 * _GIVEN_UP) != 0:
            rank.cancel(room, "given up by decode")
