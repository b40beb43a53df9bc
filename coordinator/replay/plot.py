"""Draws how a replay went over time: in the terminal with plotille, as a PNG with matplotlib.

Both are the extra ``replay``; without them there is a sentence in their place.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from coordinator.replay.samples import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from coordinator.replay.result import Part, Result

MISSING: Final = "this needs the extra `replay` (matplotlib and plotille), which is not installed"

_SUCCEEDED: Final = "succeeded"
_HEIGHT: Final = 8
_LEAST_WIDTH: Final = 40
#: What stands beside the canvas, in columns.
_MARGIN: Final = 30
_INCHES: Final = (11, 9)
_DPI: Final = 120
#: Of the lines in the terminal, which may have no colours.
_COLORS: Final = ("green", "yellow", "red", "magenta", "cyan")
_MARKERS: Final = ("", "x", "o", "+", "*")


def can_write() -> bool:
    """Whether a PNG can be written here."""
    return find_spec("matplotlib") is not None


def show(console: Console, result: Result) -> None:
    """Draw waits and outcomes in the terminal."""
    if find_spec("plotille") is None:
        console.print(f"There is no plot: {MISSING}.", highlight=False, soft_wrap=True, markup=False)
        return
    parts = result.parts()
    waits = {
        name: [(part.at_s, wait_ms) for part in parts if (wait_ms := getattr(part, f"{name}_ms")) is not None]
        for name in ("p50", "p99")
    }
    charts = (
        ("Milliseconds from prefill-complete to success, by when the request came", waits),
        ("Handoffs, by what became of them", _outcomes(parts)),
    )
    for title, lines in charts:
        console.print(f"\n{title}", highlight=False)
        console.print(_figure(lines, result.end_s, console), highlight=False, markup=False, soft_wrap=True)


def _figure(lines: Mapping[str, Sequence[tuple[float, float]]], end_s: float, console: Console) -> Text:
    figure: Any = import_module("plotille").Figure()
    figure.width, figure.height = max(_LEAST_WIDTH, console.width - _MARGIN), _HEIGHT
    figure.color_mode, figure.with_colors = "names", console.is_terminal
    figure.x_label, figure.y_label = "s of the trace", ""
    figure.register_label_formatter(float, _label)
    top = max((value for line in lines.values() for _, value in line), default=0.0)
    figure.set_x_limits(min_=0, max_=end_s)
    figure.set_y_limits(min_=0, max_=max(top, 1.0))
    for number, (name, line) in enumerate(lines.items()):
        if line:
            at_s, values = zip(*line, strict=True)
            color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
            figure.plot(at_s, values, lc=color, label=name, marker=marker)
    return Text.from_ansi(figure.show(legend=True).replace("()", "  "))


def _label(value: float, *, chars: int, delta: float, left: bool = False) -> str:
    """Write a number beside an axis; plotille calls this, also with the axis's length ``delta``."""
    del delta
    return f"{value:{'<' if left else '>'}{chars}.4g}"


def write(path: Path, result: Result) -> None:
    """Write waits, outcomes, what was in flight, and memory, one above the other.

    Raises:
        OSError: the file cannot be written.

    """
    figure: Any = import_module("matplotlib.figure").Figure(figsize=_INCHES, layout="constrained")
    waits, outcomes, flight, memory = figure.subplots(4, sharex=True)
    parts = result.parts()
    _draw_waits(waits, parts)
    _draw_outcomes(outcomes, parts, result.end_s / len(parts))
    at_s = [sample.at_s for sample in result.samples]
    flight.plot(at_s, [sample.in_flight for sample in result.samples], label="in flight")
    flight.plot(at_s, [sample.waiting for sample in result.samples], label="no engine yet")
    for kind in result.memory_bytes:
        memory.plot(at_s, [sample.memory_bytes[kind] / MIB for sample in result.samples], label=kind)
    for axes, name in (
        (waits, "ms after prefill"),
        (outcomes, "handoffs"),
        (flight, "handoffs"),
        (memory, "MiB"),
    ):
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, result.end_s)
        for moment_s, _ in result.faults:
            axes.axvline(moment_s, color="grey", linestyle=":", linewidth=1)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    memory.set_xlabel("seconds of the trace; dotted: something was made to go wrong")
    summary = result.summary
    figure.suptitle(
        f"{summary.handoffs} handoffs by {summary.backend}, {result.speed:g} times as fast as they came: "
        f"{summary.unresolved} unresolved, {summary.corrupt_pages} corrupt pages"
    )
    figure.savefig(path, format="png", dpi=_DPI)


def _draw_waits(axes: Any, parts: list[Part]) -> None:  # noqa: ANN401 - matplotlib need not be there
    for name in ("p50", "p99"):
        known = [(part.at_s, getattr(part, f"{name}_ms")) for part in parts if part.p50_ms is not None]
        if known:
            axes.plot(*zip(*known, strict=True), label=name, marker=".")


def _draw_outcomes(axes: Any, parts: list[Part], width_s: float) -> None:  # noqa: ANN401 - as above
    bottom = [0.0] * len(parts)
    for name, line in _outcomes(parts).items():
        counts = [count for _, count in line]
        axes.bar([part.at_s for part in parts], counts, width_s * 0.9, bottom=bottom, label=name)
        bottom = [below + count for below, count in zip(bottom, counts, strict=True)]


def _outcomes(parts: list[Part]) -> dict[str, list[tuple[float, float]]]:
    """How many handoffs of each part had each outcome, the most frequent one first."""
    total = sum((part.outcomes for part in parts), start=type(parts[0].outcomes)())
    return {
        outcome or _SUCCEEDED: [(part.at_s, float(part.outcomes[outcome])) for part in parts]
        for outcome, _ in total.most_common()
    }
