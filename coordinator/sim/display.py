"""What a person sees of a run: progress while it lasts, a table at its end.

On a terminal a bar moves and what happens is told above it; elsewhere there are plain lines only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from coordinator.sim.book import Book
    from coordinator.sim.summary import Summary

#: Without a terminal, progress is a line every so many parts of the whole.
_PARTS: Final = 5
_MAX_PROBLEMS: Final = 20
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")
_UNIT_STEP: Final = 1024
#: A name, a value, and a remark.
Row = tuple[str, str, str]


class Display:
    """Shows a run of ``total`` handoffs; a context manager."""

    def __init__(self, console: Console, total: int) -> None:
        """Prepare; nothing is shown before the block is entered."""
        self._console = console
        self._total = total
        self._shown_parts = 0
        self._progress = Progress(
            TextColumn("handoffs"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)

    def tell(self, what: str) -> None:
        """Say what happens."""
        self._progress.console.print(escape(what), highlight=False, soft_wrap=True)

    def tick(self, book: Book) -> None:
        """Bring the progress up to date; cheap enough to be called often."""
        done, moving = len(book.settled), len(book.open)
        self._progress.update(self._task, completed=done, description=f"{moving} on their way")
        parts = done * _PARTS // max(1, self._total)
        if not self._console.is_terminal and parts > self._shown_parts:
            self._shown_parts = parts
            self.tell(f"{done} of {self._total} handoffs are over, {moving} on their way")

    def __enter__(self) -> Self:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self._progress.stop()


def show(console: Console, summary: Summary) -> None:
    """Print the table, and a sentence on how it went."""
    show_table(console, f"{summary.handoffs} handoffs by {summary.backend}", _rows(summary))
    show_verdict(console, summary)


def show_table(console: Console, title: str, rows: Iterable[Row]) -> None:
    """Print rows of a name, a value and a remark."""
    table = Table(show_header=False, title=title)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    for name, value, remark in rows:
        table.add_row(name, value, escape(remark))
    console.print(table)


def show_verdict(console: Console, summary: Summary) -> None:
    """Say in a sentence how it went, or what is wrong."""
    if summary.ok:
        console.print("All is well: every handoff has one outcome, on every rank, and no page is wrong.")
        return
    console.print("Something is wrong:", style="bold red")
    for problem in summary.problems[:_MAX_PROBLEMS]:
        console.print(f"- {escape(problem)}", highlight=False, soft_wrap=True)
    if len(summary.problems) > _MAX_PROBLEMS:
        console.print(f"- and {len(summary.problems) - _MAX_PROBLEMS} more")


def outcome_rows(summary: Summary) -> list[Row]:
    """What became of the handoffs, and how long they took."""
    rows = [("succeeded", str(summary.succeeded), "")]
    rows += [
        (f"failed: {reason}", str(count), summary.examples.get(reason, ""))
        for reason, count in summary.failed.items()
    ]
    rows += [
        ("unresolved", str(summary.unresolved), ""),
        ("corrupt pages", str(summary.corrupt_pages), "every page was checked"),
        ("ranks agree", "yes" if summary.ranks_agree else "no", "the same on every rank, step by step"),
        ("moved", size_text(summary.bytes_moved), ""),
        ("transfer p50", _milliseconds(summary.p50_ms), "from prefill-complete to the outcome"),
        ("transfer p99", _milliseconds(summary.p99_ms), ""),
    ]
    return rows


def _rows(summary: Summary) -> list[Row]:
    rows = outcome_rows(summary)
    if summary.failed_everywhere_s is not None:
        rows.append(("failed everywhere", _seconds(summary.failed_everywhere_s), "after the kill"))
    if summary.restart_s is not None:
        rows.append(("decode ready again", _seconds(summary.restart_s), "after the kill"))
    if summary.recover_s is not None:
        rows.append(
            ("time to recover", _seconds(summary.recover_s), "from its kill to the first success after it")
        )
    else:
        rows.append(("time to heal", _seconds(summary.heal_s), "from the kill to the first success after it"))
    rows.append(("whole run", _seconds(summary.seconds), ""))
    return rows


def size_text(size_bytes: float) -> str:
    """Write a number of bytes for people."""
    for unit in _UNITS:
        if size_bytes < _UNIT_STEP or unit == _UNITS[-1]:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= _UNIT_STEP
    return ""


def _seconds(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{duration_s:.2f} s"


def _milliseconds(duration_ms: float | None) -> str:
    return "-" if duration_ms is None else f"{duration_ms:.1f} ms"
