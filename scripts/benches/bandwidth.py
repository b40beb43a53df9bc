"""The same pages through the bare engine and through the coordinator, in turn.

One prefill rank and one decode rank with pools of 1 GiB in shared memory, 16 KiB a page in each of 64
planes. Two senders take turns on them, in one run and with the same kinds of handoffs:

- *direct*: the engine's raw library in the prefill rank's process, used well, but with one agent and one
  thread (``support/bare_*.py``), from page lists to the last byte;
- *coordinator*: ``send`` and ``offer``, a real coordinator, its worker, outcomes and releases.

Each *round* hands over the same number of handoffs, ``WINDOW`` in flight at a time. A ratio is that of two
rounds next to each other, for other work on the host changes the speed of both; ``ratio`` is the median,
``ratio_low`` and ``ratio_high`` are the quartiles of ``rounds`` of them. ``overhead_us_p50`` is what
a handoff that is alone adds to its bare transfer time, from ``send`` to the outcome, also in pairs, of
which ``overhead_us_p50_low`` and ``..._high`` are the quartiles. It is measured once for each engine, with
handoffs of 1 MiB: what the coordinator adds does not grow with the size, but the time of a larger transfer
varies by more than that from one to the next. ``least_us_p50`` is what is added when the same messages and
the same bare transfer go through as many processes and threads that do nothing else (``support/relay.py``),
right after it: what any implementation adds at the least.

The figures are in a table for each case:

    nixl, mooncake                  handoffs of 256 MiB, pages that follow one another (runs are merged)
    ..._scattered                   the same, pages in random order on both sides: nothing to merge
    ..._64mib, ..._64mib_scattered  handoffs of 64 MiB
    nixl_tcp...                     as nixl, but over TCP, as between hosts; nixl copies on one host
    nixl_one_thread...              as nixl, but the worker posts from one thread, as the bare engine does,
                                    instead of from two; without targets

Decode checks that every page has arrived. An engine that is not installed is left out, and said so.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from backends import registry
from backends.base import BackendUnavailableError
from coordinator.messages import Role
from scripts.benches import at_least, at_most
from scripts.benches.support import bandwidth_ranks
from scripts.benches.support.bandwidth_ranks import (
    LAYOUT,
    POOL_PAGES,
    WINDOW,
    Case,
    Engine,
    Order,
    geometry,
    slots_of,
)
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.pairs import ratio, spread
from scripts.benches.support.relay import Cargo, relays

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scripts.benches import Arguments, Metrics, Target
    from scripts.benches.support.deployment import RankHandle, Tables

_PATIENCE_S: Final = 120.0
#: A rank that has to wait for a core is not lost.
_TABLES: Final[Tables] = {"rank": {"lost_after_s": 120.0}}
#: What the overhead is measured with.
_ALONE: Final = Case("", 1, scattered=False)
_MAX_HANDOFFS: Final = 128
_ONE_THREAD: Final = "nixl_one_thread"

ENGINES: Final = (
    Engine("nixl", "nixl", {}),
    Engine("nixl_tcp", "nixl", {"transports": "tcp", "devices": "lo"}),
    Engine(_ONE_THREAD, "nixl", {"threads_per_peer": 0}),
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
    if engine.table != _ONE_THREAD
    for case in CASES
}


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        cases: which.
        case_s: how long each of them.
        round_s: a round is about so long: long enough that its begin and its end are little of it.
        fewest: pairs of rounds.
        alone: handoffs for the overhead.

    """

    cases: tuple[Case, ...]
    case_s: float
    round_s: float
    fewest: int
    alone: int


def run(arguments: Arguments) -> Metrics:
    """Measure.

    Raises:
        SimulationError: a process failed.

    """
    effort = Effort(QUICK_CASES, 1.0, 0.4, 1, 20) if arguments.quick else Effort(CASES, 24.0, 1.0, 11, 301)
    metrics: Metrics = {}
    for engine in ENGINES:
        try:
            registry.load(engine.backend)
        except BackendUnavailableError as error:
            print(f"{engine.table} is left out: {error}", file=sys.stderr)
            continue
        ranks = bandwidth_ranks.__name__
        with Deployment(ranks, _TABLES, backend=engine.backend, options=engine.options) as deployment:
            pair = Pair(deployment, engine)
            tables = {engine.table + case.suffix: pair.measure(case, effort) for case in effort.cases}
            if engine.table != _ONE_THREAD:
                # Last, when everything is warm.
                tables[engine.table] |= spread(pair.overheads_us(effort.alone), "overhead_us_p50")
                tables[engine.table] |= spread(pair.least_us(effort.alone), "least_us_p50")
            metrics |= tables
    return metrics


class Pair:
    """A prefill rank and a decode rank, as the driver sees them."""

    def __init__(self, deployment: Deployment, engine: Engine) -> None:
        """Start them, and let their bare engines meet."""
        (self._prefill,) = deployment.start(Role.PREFILL, "prefill", 1, pages=POOL_PAGES, layout=LAYOUT)
        (self._decode,) = deployment.start(Role.DECODE, "decode", 1, pages=POOL_PAGES, layout=LAYOUT)
        deployment.wait_ready()
        self._engine = engine
        self._decode.tell(engine)
        self._address = self._decode.hear(_PATIENCE_S)
        self._prefill.tell((engine, self._address))
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
        handoffs = WINDOW * max(1, min(_MAX_HANDOFFS // WINDOW, round(effort.round_s / direct_s)))
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
        return _added_us(self._order(Order("alone", _ALONE, self._take(handoffs), handoffs)))

    def least_us(self, handoffs: int) -> list[float]:
        """What messages and a bare transfer in another process add, in microseconds."""
        here, there = slots_of(_ALONE, seed=1)[0], slots_of(_ALONE, seed=2)[0]
        cargo = Cargo(self._engine.backend, self._engine.options, self._address, geometry(0), here, there)
        return _added_us(relays(cargo, handoffs))

    def _rounds(self, case: Case, handoffs: int, effort: Effort) -> Iterator[tuple[float, float]]:
        """Seconds of a direct round and of one through the coordinator, next to each other."""
        until_s = time.monotonic() + effort.case_s
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


def _added_us(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """How much longer the second of each pair took, in microseconds."""
    return [1e6 * (through_s - bare_s) for bare_s, through_s in pairs]


def _check_arrival(decode: RankHandle) -> None:
    missing = decode.hear(_PATIENCE_S)
    if missing:
        message = f"{missing} blocks have not arrived"
        raise RuntimeError(message)
