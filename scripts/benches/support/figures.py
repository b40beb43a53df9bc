"""``scripts/figures``: writes the figures of a bench run into docs/performance.md, between its two marks.

Beside each figure that has a target stands what it is, and whether it was met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scripts.benches.__main__ import UNUSABLE, load, said, target_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from scripts.benches import Metrics

PAGE: Final = Path(__file__).parents[3] / "docs" / "performance.md"
BEGIN: Final = "<!-- figures: scripts/figures writes what is between here -->"
END: Final = "<!-- and here -->"


def main() -> int:
    """Write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/figures", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="what scripts/bench --json has written")
    parser.add_argument("--load", required=True, help="what else ran on the host meanwhile, in a few words")
    options = parser.parse_args()
    results = {
        name: metrics for file in options.files for name, metrics in json.loads(file.read_text()).items()
    }
    quick = [name for name, metrics in results.items() if "quick" in metrics]
    if quick:
        print(
            f"Of {', '.join(quick)} nothing but a quick look was taken: measure without --quick.",
            file=sys.stderr,
        )
        return UNUSABLE
    PAGE.write_text(replaced(PAGE.read_text(), "\n".join(lines(results, host(options.load)))))
    print(f"{PAGE} has the figures of {', '.join(results)}.")
    return 0


def replaced(page: str, figures: str) -> str:
    """Put figures between the marks of a page.

    Raises:
        ValueError: it lacks one.

    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        message = f"{PAGE.name} lacks one of the marks between which the figures stand"
        raise ValueError(message)
    return f"{before}{BEGIN}\n\n{figures}\n{END}{after}"


def host(load_: str) -> str:
    """Describe this host in a sentence."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory_kib = next(int(line.split()[1]) for line in _read("/proc/meminfo") if line.startswith("MemTotal"))
    linux = platform.release().partition("-")[0]
    return (
        f"Measured on {time.strftime('%Y-%m-%d')}: {len(os.sched_getaffinity(0))} cores of {cpu}, "
        f"{memory_kib / 2**20:.0f} GiB, Linux {linux}, Python {platform.python_version()}; "
        f"{load_}."
    )


def lines(results: Mapping[str, Metrics], host_: str) -> Iterator[str]:
    """Write tables in Markdown: one of each bench's plain metrics, one with a row for each of its tables."""
    yield from (host_, "")
    for name, metrics in results.items():
        bench = load(name)
        summary = (bench.__doc__ or "").partition("\n")[0] if bench is not None else ""
        yield from (f"### {name}", "", summary, "")
        plain = {metric: figure for metric, figure in metrics.items() if not isinstance(figure, dict)}
        tables = {table: figures for table, figures in metrics.items() if isinstance(figures, dict)}
        if plain:
            yield from ("| metric | figure |", "| --- | ---: |")
            yield from (
                f"| `{metric}` | {_cell(bench, metric, figure)} |" for metric, figure in plain.items()
            )
            yield ""
        if tables:
            columns = list(dict.fromkeys(metric for figures in tables.values() for metric in figures))
            yield f"| | {' | '.join(f'`{column}`' for column in columns)} |"
            yield f"| --- |{' ---: |' * len(columns)}"
            for table, figures in tables.items():
                cells = [
                    _cell(bench, f"{table}.{column}", figures[column]) if column in figures else ""
                    for column in columns
                ]
                yield f"| `{table}` | {' | '.join(cells)} |"
            yield ""


def _cell(bench: ModuleType | None, metric: str, figure: float) -> str:
    target = target_of(bench, metric)
    verdict = "" if target is None else f" ({target}: {'met' if target.met(figure) else 'missed'})"
    return said(figure) + verdict


def _read(path: str) -> list[str]:
    return Path(path).read_text(errors="replace").splitlines()


if __name__ == "__main__":
    sys.exit(main())
