"""The same pages through the bare engine and through the coordinator, in turn.

One prefill rank and one decode rank with pools of 1 GiB in shared memory, 16 KiB a page in each of 64
planes. Two senders take turns on them, in one run and with the same kinds of handoffs:

- *direct*: the engine's raw library in the prefill rank's process, as an expert would use it
  (``support/bare_*.py``), from page lists to the last byte;
- *coordinator*: ``send`` and ``offer``, a real coordinator, its worker, outcomes and releases.

Each *round* hands over the same number of handoffs, ``WINDOW`` in flight at a time. A ratio is that of two
rounds next to each other, for other work on the host changes the speed of both; ``ratio`` is the median,
``ratio_low`` and ``ratio_high`` are the quartiles of ``rounds`` of them. ``overhead_us_p50`` is what
a handoff that is alone adds to its bare transfer time, from ``send`` to the outcome, also in pairs, of
which ``overhead_us_p50_low`` and ``..._high`` are the quartiles. It is measured once for each engine, with
handoffs of 1 MiB: what the coordinator adds does not grow with the size, but the time of a larger transfer
varies by more than that from one to the next.

The figures are in a table for each case:

    nixl, mooncake                  handoffs of 256 MiB, pages that follow one another (runs are merged)
    ..._scattered                   the same, pages in random order on both sides: nothing to merge
    ..._64mib, ..._64mib_scattered  handoffs of 64 MiB
    nixl_tcp...                     as nixl, but over TCP, as between hosts; nixl copies on one host

Decode checks that every page has arrived. An engine that is not installed is left out, and said so.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from backends import registry
from backends.base import BackendUnavailableError
from coordinator.client import DecodeRank, Layout, Outcome, PrefillRank
from coordinator.messages import Role
from scripts.benches import at_least, at_most
from scripts.benches.support import bare
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.pairs import ratio, spread
from scripts.benches.support.waiting import barrier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from coordinator.client import KVPool
    from scripts.benches import Arguments, Metrics, Target
    from scripts.benches.support.deployment import RankHandle, Tables

#: Handoffs in flight.
WINDOW: Final = 4
LAYOUT: Final = Layout(layers=32, page_tokens=16, kv_heads=4, head_size=128, dtype="bfloat16")
#: Pages that make 1 MiB, over all planes.
_MIB_PAGES: Final = (1 << 20) // (LAYOUT.planes * LAYOUT.page_bytes(1))
POOL_PAGES: Final = WINDOW * 256 * _MIB_PAGES
_POLL_S: Final = 50e-6
_PATIENCE_S: Final = 120.0
#: A rank that has to wait for a core is not lost.
_TABLES: Final[Tables] = {"rank": {"lost_after_s": 120.0}}
#: What the overhead is measured with.
_SMALL_MIB: Final = 1
#: A round is at least so long, so that its begin and its end are little of it.
_ROUND_S: Final = 0.4
_MAX_HANDOFFS: Final = 32


class Engine(NamedTuple):
    """What is measured: a backend and its options."""

    table: str
    backend: str
    options: dict[str, object]


class Case(NamedTuple):
    """The handoffs of a table."""

    suffix: str
    mib: int
    scattered: bool


ENGINES: Final = (
    Engine("nixl", "nixl", {}),
    Engine("nixl_tcp", "nixl", {"transports": "tcp", "devices": "lo"}),
    Engine("mooncake", "mooncake", {}),
)
CASES: Final = (
    Case("", 256, scattered=False),
    Case("_scattered", 256, scattered=True),
    Case("_64mib", 64, scattered=False),
    Case("_64mib_scattered", 64, scattered=True),
)
#: The others take long where an engine is slow.
QUICK_CASES: Final = (CASES[0], CASES[3])
TARGETS: Final[dict[str, Target]] = {"overhead_us_p50": at_most(600)} | {
    f"{engine.table}{case.suffix}.ratio": at_least(0.98 if case.mib == 256 else 0.95)  # noqa: PLR2004 - as named
    for engine in ENGINES
    for case in CASES
}


class Order(NamedTuple):
    """What a rank shall do: ``direct``, ``coordinator`` or ``alone``; its rooms count from ``first``."""

    what: str
    case: Case
    first: int
    handoffs: int


class Effort(NamedTuple):
    """How much is measured: which cases, seconds for each, the fewest pairs of rounds, handoffs alone."""

    cases: tuple[Case, ...]
    rounds_s: float
    fewest: int
    alone: int


def run(arguments: Arguments) -> Metrics:
    """Measure.

    Raises:
        SimulationError: a process failed.

    """
    effort = Effort(QUICK_CASES, 1.0, 1, 20) if arguments.quick else Effort(CASES, 9.0, 2, 301)
    metrics: Metrics = {}
    for engine in ENGINES:
        try:
            registry.load(engine.backend)
        except BackendUnavailableError as error:
            print(f"{engine.table} is left out: {error}", file=sys.stderr)
            continue
        with Deployment(__name__, _TABLES, backend=engine.backend, options=engine.options) as deployment:
            pair = Pair(deployment, engine)
            tables = {engine.table + case.suffix: pair.measure(case, effort) for case in effort.cases}
            # Last, when everything is warm.
            tables[engine.table] |= spread(pair.overheads_us(effort.alone), "overhead_us_p50")
            metrics |= tables
    return metrics


class Pair:
    """A prefill rank and a decode rank, as the driver sees them."""

    def __init__(self, deployment: Deployment, engine: Engine) -> None:
        """Start them, and let their bare engines meet."""
        (self._prefill,) = deployment.start(Role.PREFILL, "prefill", 1, pages=POOL_PAGES, layout=LAYOUT)
        (self._decode,) = deployment.start(Role.DECODE, "decode", 1, pages=POOL_PAGES, layout=LAYOUT)
        deployment.wait_ready()
        self._decode.tell(engine)
        self._prefill.tell((engine, self._decode.hear(_PATIENCE_S)))
        self._prefill.hear(_PATIENCE_S)
        self._rooms = count(1)
        self._warm = False

    def measure(self, case: Case, effort: Effort) -> dict[str, float]:
        """Measure one case."""
        size_bytes = case.mib << 20
        if not self._warm:
            # All memory is touched, and the links are open.
            self._round("coordinator", case, WINDOW)
            self._warm = True
        direct_s = self._round("direct", case, WINDOW)
        handoffs = WINDOW * max(1, min(_MAX_HANDOFFS // WINDOW, round(_ROUND_S / direct_s)))
        rounds = list(self._rounds(case, handoffs, effort))
        gbits = 8 * handoffs * size_bytes / 1e9
        return {
            "bytes": size_bytes,
            "direct_gbps": gbits / statistics.median(bare_s for bare_s, _ in rounds),
            "coordinator_gbps": gbits / statistics.median(through_s for _, through_s in rounds),
            **ratio(rounds),
            "rounds": len(rounds),
        }

    def overheads_us(self, handoffs: int) -> list[float]:
        """What the coordinator adds to each handoff when there is one at a time, in microseconds."""
        case = Case("", _SMALL_MIB, scattered=False)
        pairs = self._order(Order("alone", case, self._take(handoffs), handoffs))
        return [1e6 * (through_s - bare_s) for bare_s, through_s in pairs]

    def _rounds(self, case: Case, handoffs: int, effort: Effort) -> Iterator[tuple[float, float]]:
        """Seconds of a direct round and of one through the coordinator, next to each other."""
        until_s = time.monotonic() + effort.rounds_s
        for number in count():
            if number >= effort.fewest and time.monotonic() > until_s:
                return
            # Each comes first in half of the pairs.
            order = ("direct", "coordinator") if number % 2 else ("coordinator", "direct")
            took_s = {what: self._round(what, case, handoffs) for what in order}
            yield took_s["direct"], took_s["coordinator"]

    def _round(self, what: str, case: Case, handoffs: int) -> float:
        """How long that many handoffs take."""
        return float(self._order(Order(what, case, self._take(handoffs), handoffs)))

    def _order(self, order: Order) -> Any:  # noqa: ANN401 - as ``RankHandle.hear``
        for rank in (self._decode, self._prefill):
            rank.tell(order)
            if rank is self._decode:
                # Its first pages are offered, or waiting for a write.
                rank.hear(_PATIENCE_S)
        answer = self._prefill.hear(_PATIENCE_S)
        self._decode.tell("over")
        _check_arrival(self._decode)
        return answer

    def _take(self, rooms: int) -> int:
        first = next(self._rooms)
        for _ in range(rooms - 1):
            next(self._rooms)
        return first


def _check_arrival(decode: RankHandle) -> None:
    missing = decode.hear(_PATIENCE_S)
    if missing:
        message = f"{missing} blocks have not arrived"
        raise RuntimeError(message)


# --- in the ranks' processes -----------------------------------------------------------------------


def pool_engine(rank: PrefillRank | DecodeRank, pool: KVPool, driver: Connection) -> None:
    """Do what the driver says."""
    page_bytes = pool.layout.page_bytes(1)
    address = pool.regions[0].address
    memory = bare.Memory(address, page_bytes, pool.layout.planes, pool.pages)
    words = np.ctypeslib.as_array((ctypes.c_uint64 * (pool.size_bytes // 8)).from_address(address))
    blocks = words.reshape(memory.count, page_bytes // 8)
    if isinstance(rank, DecodeRank):
        blocks.fill(0)
        _decode(rank, memory, blocks, driver)
    else:
        blocks.fill(1)
        _prefill(rank, memory, driver)


def _slots(case: Case, seed: int) -> list[NDArray[np.int32]]:
    """The pages of each handoff in flight; with other seeds, in another order when scattered."""
    pages = case.mib * _MIB_PAGES
    order = np.arange(POOL_PAGES, dtype=np.int32)
    if case.scattered:
        order = np.random.default_rng(seed).permutation(order)
    return [order[slot * pages : (slot + 1) * pages] for slot in range(WINDOW)]


def _decode(rank: DecodeRank, memory: bare.Memory, blocks: NDArray[np.uint64], driver: Connection) -> None:
    """Offer pages, and check that they come."""
    engine: Engine = driver.recv()
    receiver = bare.receiver(engine.backend, engine.options, memory)
    driver.send(receiver.address)
    try:
        while True:
            order: Order = driver.recv()
            slots = _slots(order.case, seed=2)
            blocks[:, 0] = blocks[:, -1] = 0
            rooms = range(order.first, order.first + order.handoffs)
            if order.what == "coordinator":
                _offer_all(rank, rooms, slots, driver)
            else:
                if order.what == "alone":
                    # All at once, for one place: they come one by one.
                    for room in rooms:
                        rank.offer(room, slots[0])
                    barrier(rank)
                driver.send("begun")
            driver.recv()
            rank.drain()
            written = slots if order.what != "alone" else slots[:1]
            at = np.concatenate([memory.blocks(pages) for pages in written])
            driver.send(int(np.count_nonzero(blocks[at, 0] != 1) + np.count_nonzero(blocks[at, -1] != 1)))
    finally:
        receiver.close()


def _offer_all(rank: DecodeRank, rooms: range, slots: list[NDArray[np.int32]], driver: Connection) -> None:
    """Offer pages for all rooms, as they become free; tell when the first are offered."""
    free = list(slots)
    waiting = deque(rooms)
    held: dict[int, NDArray[np.int32]] = {}
    while waiting or held:
        while waiting and free:
            room = waiting.popleft()
            held[room] = free.pop()
            rank.offer(room, held[room])
            if room == rooms[WINDOW - 1]:
                driver.send("begun")
        rank.wait(1.0)
        # The release of an earlier order's room may come only now.
        free += [held.pop(room) for room in _released(rank) if room in held]


def _prefill(rank: PrefillRank, memory: bare.Memory, driver: Connection) -> None:
    """Send pages, in one way or the other."""
    engine, address = driver.recv()
    sender = bare.sender(engine.backend, engine.options, memory, address)
    driver.send("met")
    try:
        while True:
            order: Order = driver.recv()
            here, there = _slots(order.case, seed=1), _slots(order.case, seed=2)
            if order.what == "alone":
                driver.send(_alone(rank, sender, order, here[0], there[0]))
                continue
            began_s = time.monotonic()
            if order.what == "direct":
                _direct(sender, order.handoffs, here, there)
            else:
                _through(rank, order, here)
            driver.send(time.monotonic() - began_s)
    finally:
        sender.close()


def _direct(
    sender: bare.Sender, handoffs: int, here: list[NDArray[np.int32]], there: list[NDArray[np.int32]]
) -> None:
    """Write as many handoffs, ``WINDOW`` of them at a time."""
    free = list(range(WINDOW))
    begun = 0
    moving: list[tuple[int, object]] = []
    while begun < handoffs or moving:
        while free and begun < handoffs:
            slot = free.pop()
            begun += 1
            moving.append((slot, sender.post(here[slot], there[slot])))
        left = [(slot, transfer) for slot, transfer in moving if not sender.done(transfer)]
        if len(left) == len(moving):
            time.sleep(_POLL_S)
        free += [slot for slot, transfer in moving if (slot, transfer) not in left]
        moving = left


def _through(rank: PrefillRank, order: Order, here: list[NDArray[np.int32]]) -> None:
    """Hand over as many, ``WINDOW`` of them at a time."""
    free = list(here)
    waiting = deque(range(order.first, order.first + order.handoffs))
    held: dict[int, NDArray[np.int32]] = {}
    while waiting or held:
        while free and waiting:
            room = waiting.popleft()
            held[room] = free.pop()
            rank.send(room, held[room], last=True)
        rank.wait(1.0)
        free += [held.pop(room) for room in _released(rank) if room in held]


def _released(rank: PrefillRank | DecodeRank) -> list[int]:
    """Rooms whose pages are free, of the events that have come; all outcomes must be successes."""
    rooms = []
    for event in rank.drain():
        if isinstance(event, Outcome):
            _check(event)
        else:
            rooms.append(event.room)
    return rooms


def _alone(
    rank: PrefillRank,
    sender: bare.Sender,
    order: Order,
    here: NDArray[np.int32],
    there: NDArray[np.int32],
) -> list[tuple[float, float]]:
    """Seconds of a bare transfer and of the handoff of the same pages after it, again and again."""
    pairs = []
    for room in range(order.first, order.first + order.handoffs):
        began_s = time.monotonic()
        transfer = sender.post(here, there)
        while not sender.done(transfer):
            time.sleep(_POLL_S)
        between_s = time.monotonic()
        rank.send(room, here, last=True)
        outcome = None
        while outcome is None:
            rank.wait(1.0)
            outcome = next((event for event in rank.drain() if isinstance(event, Outcome)), None)
        pairs.append((between_s - began_s, time.monotonic() - between_s))
        _check(outcome)
    return pairs


def _check(outcome: Outcome) -> None:
    """Raise RuntimeError unless it has succeeded."""
    if outcome.failure is not None:
        message = f"room {outcome.room} has failed: {outcome.failure}"
        raise RuntimeError(message)
