"""``scripts/bench``: runs benches by name, shows their figures beside the targets."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import pkgutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop
from rich.console import Console
from rich.table import Table

import scripts.benches
from coordinator.sim.files import why_not_writable
from scripts.benches import Arguments, Metrics, Target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

UNUSABLE: Final = 2


def files() -> list[str]:
    """The modules that may be benches."""
    found = (module.name for module in pkgutil.iter_modules(scripts.benches.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def load(name: str) -> ModuleType | None:
    """Import a bench; None when there is none of that name."""
    if name not in files():
        return None
    module = importlib.import_module(f"scripts.benches.{name}")
    return module if hasattr(module, "run") else None


def measure(bench: ModuleType, arguments: Arguments) -> Metrics:
    """Run a bench, in a loop of its own when it is a coroutine."""
    if inspect.iscoroutinefunction(bench.run):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return dict(runner.run(bench.run(arguments)))
    return dict(bench.run(arguments))


def flat(metrics: Metrics) -> dict[str, float]:
    """Return one figure a name; a figure of a table in the table is ``table.metric``."""
    figures: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            figures.update({f"{name}.{inner}": figure for inner, figure in value.items()})
        else:
            figures[name] = value
    return figures


def target_of(bench: ModuleType | None, metric: str) -> Target | None:
    """Return the target of a metric of a bench, if it has one: by its whole name, or by that in its table."""
    targets: Mapping[str, Target] = getattr(bench, "TARGETS", {})
    return targets.get(metric) or targets.get(metric.rpartition(".")[2])


def said(figure: float) -> str:
    """Write a figure with digits that people can read."""
    return f"{figure:,.4g}" if abs(figure) < 1000 else f"{figure:,.0f}"  # noqa: PLR2004 - as above


def show(console: Console, name: str, metrics: Metrics, bench: ModuleType, seconds: float) -> None:
    """Print the figures of a bench."""
    table = Table(title=f"{name} ({seconds:.1f} s)", title_justify="left")
    table.add_column("metric")
    table.add_column("figure", justify="right")
    table.add_column("target")
    for metric, figure in flat(metrics).items():
        target = target_of(bench, metric)
        verdict = "" if target is None else f"{target}: {'met' if target.met(figure) else 'MISSED'}"
        table.add_row(metric, said(figure), verdict)
    console.print(table)


def listing() -> str:
    """Return the names of all benches and what each measures."""
    benches = {name: bench for name in files() if (bench := load(name)) is not None}
    lines = [f"  {name:12} {(bench.__doc__ or '').partition(chr(10))[0]}" for name, bench in benches.items()]
    return "\n".join(["The benches are:", *lines])


def main() -> int:
    """Run what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benches; none: list them")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write {bench: {metric: figure}} to this file"
    )
    parser.add_argument("--quick", action="store_true", help="measure less, only to see that it works")
    options = parser.parse_args()
    benches: dict[str, ModuleType] = {}
    unknown = []
    for name in options.names:
        bench = load(name)
        if bench is None:
            unknown.append(name)
        else:
            benches[name] = bench
    problem = "" if options.json is None else why_not_writable(options.json)
    if problem:
        print(f"{options.json} cannot be written: {problem}.", file=sys.stderr)
        return UNUSABLE
    if unknown:
        print(f"There is no bench {', '.join(map(repr, unknown))}.", file=sys.stderr)
    if unknown or not benches:
        print(listing(), file=sys.stderr if unknown else sys.stdout)
        return UNUSABLE if unknown else 0
    return _run_all(benches, options.json, Arguments(quick=options.quick))


def _run_all(benches: dict[str, ModuleType], file: Path | None, arguments: Arguments) -> int:
    console = Console()
    results: dict[str, Metrics] = {}
    failed = []
    for name, bench in benches.items():
        started_s = time.perf_counter()
        try:
            metrics = measure(bench, arguments)
        except Exception:  # noqa: BLE001 - one bench that fails must not cost the figures of the others
            traceback.print_exc()
            failed.append(name)
            continue
        if arguments.quick:
            # So that nobody takes them for figures.
            metrics["quick"] = 1
        results[name] = metrics
        show(console, name, metrics, bench, time.perf_counter() - started_s)
        if file is not None:
            file.write_text(json.dumps(results, indent=2) + "\n")
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
