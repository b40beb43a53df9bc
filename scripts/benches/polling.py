"""Retiring requests in each scheduler step: all senders polled and all-reduced, or drained by head token.

The same scheduler loop in 2 and in 4 rank processes learns in two ways what has ended, in turn (see
``support/scheduler_loop.py``). In flight are 1, 64, 256 and 1,024 requests; a step has no forward pass, or
one of 20 ms. There is a table for each, ``r2_n256`` and ``r2_n256_forward``:

    polling_us_p50, head_us_p50   cost of retiring in a step in which nothing has ended, on the slowest rank;
                                  ..._fastest on the fastest one: all others lie between
    polling_us_p10, head_us_p10   the same, 10th percentile: when nobody else is in the way; ..._p99
    ratio, _low, _high            polling over head, median and quartiles over the pairs of turns
    polling_retire_ms_p50, head_  from the end of a transfer until it is retired on all ranks
    polling_late_ms, head_late_ms what a rank that is 20 ms late costs the slowest of the others in that step

With *head*, transfers are real ones, over loopback, and end in the worker; with *polling* the end of a
transfer costs nothing, so the comparison favours it. ``r2_flat``: the cost by head token with 1,024 in
flight over that with 1, of both the 10th percentile, for these two cannot take turns. Where
``scripts/sglang-env`` was run, SGLang's own function polls (``sglang`` is 1 then), else one written from
its description.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from coordinator.messages import Role
from coordinator.sim.errors import SimulationError
from scripts.benches import at_least, at_most
from scripts.benches.support import stamped_loopback
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.pairs import percentile, ratio
from scripts.benches.support.scheduler_orders import Begin, Retire, Retired, Steps, Way, World
from tests.sglang.rig import python_with_sglang

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scripts.benches import Arguments, Metrics, Target
    from scripts.benches.support.deployment import RankHandle, Tables
    from scripts.benches.support.scheduler_orders import Order

RANKS: Final = (2, 4)
IN_FLIGHT: Final = (1, 64, 256, 1024)
QUICK_IN_FLIGHT: Final = (1, 256)
FORWARD_S: Final = 0.02
TARGETS: Final[dict[str, Target]] = {
    "r2_n256.ratio": at_least(200),
    "r2_flat": at_most(1.5),
    "r4_flat": at_most(1.5),
}

WAYS: Final[tuple[Way, ...]] = get_args(Way)
_TABLES: Final[Tables] = {"handoff": {"deadline_s": 3600.0, "hard_cap_s": 3600.0}}
#: The rooms that end, each with a page of its own, are numbered from here on.
_FIRST_ENDING: Final = 2000
_PAGES: Final = 6000
_LATE_EVERY: Final = 5
_PATIENCE_S: Final = 300.0
#: From the order to the first end: for it to reach all processes.
_LEAD_S: Final = 0.1


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        pairs: turns of each way.
        steps: of a turn.
        ends: rooms that end in a turn.

    """

    pairs: int
    steps: int
    ends: int


def run(arguments: Arguments) -> Metrics:
    """Measure.

    Raises:
        SimulationError: a process failed, or the ranks did not retire in the same step.

    """
    python = None if arguments.quick else python_with_sglang()
    metrics: Metrics = {"sglang": float(python is not None)}
    for size in RANKS[:1] if arguments.quick else RANKS:
        with tempfile.TemporaryDirectory(prefix="kvc-stamps-") as directory:
            stamped_loopback.install(Path(directory))
            with _deployment(Path(directory), python) as deployment:
                engine = Engine(deployment, size, Path(directory), python is not None)
                tables = dict(_tables(engine, size, quick=arguments.quick))
        few, *_, many = (tables[name]["head_us_p10"] for name in tables if "forward" not in name)
        metrics |= tables
        metrics[f"r{size}_flat"] = many / few
    return metrics


def _deployment(directory: Path, python: str | None) -> Deployment:
    backend = stamped_loopback.NAME
    options = {stamped_loopback.DIRECTORY: str(directory), stamped_loopback.PAGES: _PAGES}
    return Deployment(
        "scripts.benches.support.scheduler",
        {**_TABLES, f"backend.options.{backend}": options},
        backend=backend,
        import_from=directory,
        python=python or sys.executable,
    )


def _tables(engine: Engine, size: int, *, quick: bool) -> Iterator[tuple[str, dict[str, float]]]:
    still, moving = (Effort(4, 60, 8), Effort(2, 8, 4)) if quick else (Effort(10, 200, 12), Effort(4, 25, 10))
    for n in QUICK_IN_FLIGHT if quick else IN_FLIGHT:
        engine.begin(n)
        yield f"r{size}_n{n}", engine.measure(still, 0.0)
        yield f"r{size}_n{n}_forward", engine.measure(moving, FORWARD_S)


class Engine:
    """The ranks of a prefill engine, and the decode engine that lets its rooms end."""

    def __init__(self, deployment: Deployment, size: int, directory: Path, sglang: bool) -> None:  # noqa: FBT001 - one of four that are all needed
        """Start the ranks and have them meet."""
        self._directory = directory
        self._prefill = deployment.start(Role.PREFILL, "prefill", size, pages=_PAGES)
        self._decode = deployment.start(Role.DECODE, "decode", size, pages=_PAGES)
        deployment.wait_ready()
        for number, rank in enumerate(self._prefill):
            rank.tell(World(number, size, str(directory / "meeting"), sglang))
        _hear(self._prefill)
        self._in_flight = 0
        self._rooms = count(_FIRST_ENDING)

    def begin(self, in_flight: int) -> None:
        """Take rooms on until so many are in flight."""
        self._ask(Begin(self._in_flight + 1, in_flight))
        self._in_flight = in_flight

    def measure(self, effort: Effort, forward_s: float) -> dict[str, float]:
        """Measure both ways in turn."""
        # The first turn warms up.
        for way in WAYS:
            self._ask(Steps(way, effort.steps, forward_s))
        pairs = [self._pair(number, effort, forward_s) for number in range(effort.pairs)]
        figures = ratio((_slowest(pair["polling"]), _slowest(pair["head"])) for pair in pairs)
        for way in WAYS:
            by_rank = [list(chain(*costs)) for costs in zip(*(pair[way] for pair in pairs), strict=True)]
            p50s_us = [1e6 * median(costs_s) for costs_s in by_rank]
            figures[f"{way}_us_p50"] = max(p50s_us)
            figures[f"{way}_us_p50_fastest"] = min(p50s_us)
            figures[f"{way}_us_p10"] = 1e6 * max(percentile(costs_s, 10) for costs_s in by_rank)
            figures[f"{way}_us_p99"] = 1e6 * max(percentile(costs_s, 99) for costs_s in by_rank)
        if not forward_s:
            figures |= {f"{way}_late_ms": 1e3 * self._late_s(way, effort) for way in WAYS}
        retired_s: dict[Way, list[float]] = {way: [] for way in WAYS}
        for _ in range(2):
            for way in WAYS:
                retired_s[way] += self._retire(way, effort, forward_s)
        return figures | {f"{way}_retire_ms_p50": 1e3 * median(retired_s[way]) for way in WAYS}

    def _pair(self, number: int, effort: Effort, forward_s: float) -> dict[Way, list[list[float]]]:
        """One turn of each way, in an order that changes; the costs of the steps, by rank."""
        return {way: self._ask(Steps(way, effort.steps, forward_s)) for way in WAYS[:: 1 - 2 * (number % 2)]}

    def _late_s(self, way: Way, effort: Effort) -> float:
        """What the steps in which the last rank is late cost the slowest other one, at the median."""
        steps = effort.ends * _LATE_EVERY
        costs_s: list[list[float]] = self._ask(Steps(way, steps, late_every=_LATE_EVERY))
        return max(median(costs[::_LATE_EVERY]) for costs in costs_s[:-1])

    def _retire(self, way: Way, effort: Effort, forward_s: float) -> list[float]:
        """From each transfer's end until all ranks have retired it.

        Raises:
            SimulationError: they did not do so in the same step.

        """
        rooms = [next(self._rooms) for _ in range(effort.ends)]
        # Not a multiple of the step: the ends fall anywhere in it.
        order = Retire(way, rooms[0], rooms[-1], 0.007 + 1.37 * forward_s, forward_s)
        ranks = self._prefill if way == "polling" else [*self._prefill, *self._decode]
        for rank in ranks:
            rank.tell(order)
        _hear(ranks)
        begin_s = time.monotonic() + _LEAD_S
        for rank in ranks:
            rank.tell(begin_s)
        answers: list[Retired] = _hear(self._prefill)
        if way == "head":
            _hear(self._decode)
        if len({tuple(answer.steps) for answer in answers}) > 1:
            message = f"the ranks have retired rooms in different steps, by {way}: {answers}"
            raise SimulationError(message)
        if way == "head":
            ended_s = stamped_loopback.done_s(self._directory)[rooms].tolist()
        else:
            ended_s = [max(moments) for moments in zip(*(answer.ended_s for answer in answers), strict=True)]
        retired_s = [max(moments) for moments in zip(*(answer.retired_s for answer in answers), strict=True)]
        return [after - before for before, after in zip(ended_s, retired_s, strict=True)]

    def _ask(self, order: Order) -> list[Any]:
        for rank in self._prefill:
            rank.tell(order)
        return _hear(self._prefill)


def _hear(ranks: Sequence[RankHandle]) -> list[Any]:
    return [rank.hear(_PATIENCE_S) for rank in ranks]


def _slowest(costs_s: Sequence[Sequence[float]]) -> float:
    """The median cost of a step, on the rank where it is highest."""
    return max(median(costs) for costs in costs_s)
