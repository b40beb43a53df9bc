"""What retiring requests costs SGLang's prefill scheduler in each step, as it is and with the plugin.

Real SGLang functions on two ranks, the original and the hooked one in turn, with 1, 256 and 1,024
requests in flight of which none is done. ``ratio`` is the original over the hooked one's time, over
pairs of turns. Needs the environment of ``scripts/sglang-env``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final

from coordinator.errors import CoordinatorError
from scripts.benches import at_most
from scripts.benches.support.pairs import percentile, ratio
from tests.sglang.rig import Coordinator, Engine, Host, python_with_sglang, until

if TYPE_CHECKING:
    from scripts.benches import Arguments, Target

IN_FLIGHT: Final = (1, 256, 1024)
TARGETS: Final[dict[str, Target]] = {"hooked_us_p50": at_most(10), "all_reduces": at_most(0)}


def run(arguments: Arguments) -> dict[str, float | dict[str, float]]:
    """Measure; microseconds a step, of the slower rank.

    Raises:
        CoordinatorError: there is no environment with SGLang.

    """
    python = python_with_sglang()
    if python is None:
        message = "there is no environment with SGLang; make it with scripts/sglang-env (2 GB, some minutes)"
        raise CoordinatorError(message)
    place = Path(mkdtemp(prefix="kv-"))
    host = Host(python, place)
    coordinator = Coordinator(place, deadline_s=1500.0)
    try:
        with Engine(host, place, 2, coordinator.address) as engine:
            until(engine.is_on, "the coordinator decides")
            return _measure(engine, 50 if arguments.quick else 400)
    finally:
        coordinator.close()
        host.close()
        shutil.rmtree(place)


def _measure(engine: Engine, rounds: int) -> dict[str, float | dict[str, float]]:
    figures: dict[str, float | dict[str, float]] = {}
    begun = 0
    for count in IN_FLIGHT:
        rooms = range(begun + 1, count + 1)
        begun = count
        engine.say(f"prefill {' '.join(map(str, rooms))}")
        engine.in_flight(*rooms)
        engine.say(f"measure {rounds}")
        reports: list[dict[str, Any]] = until(lambda: _measured(engine), "the measurement", 120.0)
        figures[f"inflight_{count}"] = {
            f"{name}_us_p{percent}": max(percentile(report["measured"][name], percent) for report in reports)
            for name in ("original", "hooked")
            for percent in (10, 50)
        } | ratio(
            (original, hooked)
            for report in reports
            for original, hooked in zip(*map(report["measured"].get, ("original", "hooked")), strict=True)
        )
        engine.all("forget measured")
    engine.all("count")
    reports = until(lambda: _stepped(engine, 1000), "steps in which nothing is new", 120.0)
    figures["all_reduces"] = max(report["calls"].get("all_reduce", 0) for report in reports)
    for room in range(1, begun + 1):
        engine.all("done", room)
    engine.done(*range(1, begun + 1), bound_s=120.0)
    return figures


def _measured(engine: Engine) -> list[dict[str, Any]] | None:
    reports = engine.reports()
    return reports if all(report["measured"] for report in reports) else None


def _stepped(engine: Engine, steps: int) -> list[dict[str, Any]] | None:
    reports = engine.reports()
    return reports if all(report["steps_counted"] >= steps for report in reports) else None
