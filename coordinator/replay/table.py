"""The table at the end of a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.sim.display import outcome_rows, show_table, show_verdict, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from coordinator.replay.result import Result
    from coordinator.sim.display import Row


def show(console: Console, result: Result) -> None:
    """Print it, and a sentence on how it went."""
    summary = result.summary
    title = (
        f"{summary.handoffs} handoffs by {summary.backend}, at {result.speed:g} times the speed of the trace"
    )
    show_table(console, title, [*outcome_rows(summary), *_rows(result)])
    show_verdict(console, summary)


def _rows(result: Result) -> list[Row]:
    part = result.prefix_pages / max(1, result.prompt_pages)
    remark = "flat" if result.is_flat else "it has GROWN"
    rows = [
        ("in flight", str(result.most_in_flight), "at the most"),
        ("pages", f"{result.prompt_pages:,}", f"of the prompts; decode had {100 * part:.0f} % already"),
        ("router behind", f"{result.behind_s:.2f} s", "at the most, on the clock"),
        ("whole run", f"{result.summary.seconds:.2f} s", f"{result.end_s:.0f} s of the trace"),
        ("memory", size_text(sum(result.memory_bytes.values())), f"{remark}; pools do not count"),
    ]
    for kind, growth_bytes in result.growth_bytes.items():
        grown = f"{'+' if growth_bytes >= 0 else '-'}{size_text(abs(growth_bytes))}"
        rows.append((f"  {kind}", size_text(result.memory_bytes[kind]), f"{grown} after the warm-up"))
    return rows
