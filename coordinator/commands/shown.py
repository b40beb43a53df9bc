"""Writes answers down for people: tables and sentences; colours only on a terminal.

Much in them comes from others: no text of an answer reaches the terminal as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from coordinator.printable import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI: Final = 1024
_COLOURS: Final = {
    "open": "dim",
    "waiting": "yellow",
    "moving": "cyan",
    "succeeded": "green",
    "failed": "red",
    "debug": "dim",
    "info": "green",
    "warning": "yellow",
    "error": "red",
}
Answer = dict[str, Any]


def duration(seconds: float | None) -> str:
    """Return a duration in the unit that fits."""
    if seconds is None:
        return "-"
    if abs(seconds) < _MINUTE_S:
        return f"{seconds:.1f} s"
    if abs(seconds) < _HOUR_S:
        return f"{seconds / _MINUTE_S:.1f} min"
    return f"{seconds / _HOUR_S:.1f} h"


def size(size_bytes: float) -> str:
    """Return a number of bytes in the unit that fits."""
    for unit in _UNITS:
        if size_bytes < _KIBI or unit == _UNITS[-1]:
            break
        size_bytes /= _KIBI
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"


def status(answer: Answer, oldest: list[Answer]) -> RenderableType:
    """Show the coordinator at a glance, and the handoffs that have waited longest."""
    answer = _readable(answer)
    head = Text.assemble(
        (answer["name"], "bold"),
        f" {answer['version']}, backend {answer['backend']}, up {duration(answer['uptime_s'])}: ",
        ("ready", "green") if answer["ready"] else ("NOT READY", "bold red"),
    )
    reasons = [Text(f"  {reason}", "red") for reason in answer["reasons"]]
    parts: list[RenderableType] = [head, *reasons, _numbers(answer)]
    if answer["groups"]:
        parts.append(_groups(answer["groups"]))
    if oldest:
        parts.append(handoffs(oldest))
    return Group(*parts)


def _numbers(answer: Answer) -> Table:
    table = Table.grid(padding=(0, 2))
    states = ", ".join(f"{count} {state}" for state, count in answer["in_flight"].items())
    oldest = ""
    if answer["oldest_s"] is not None:
        oldest = f"; the oldest {duration(answer['oldest_s'])}"
        if answer["oldest_after_prefill_s"] is not None:
            oldest += f", {duration(answer['oldest_after_prefill_s'])} after prefill"
    table.add_row("in flight", f"{sum(answer['in_flight'].values())}", f"{states}{oldest}")
    table.add_row("succeeded", f"{answer['succeeded']}", f"{size(answer['moved_bytes'])} moved")
    failed = answer["failed"]
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(failed.items(), key=lambda f: -f[1]))
    table.add_row("failed", f"{sum(failed.values())}", reasons)
    held = answer["quarantine"]
    table.add_row(
        "not quiet",
        f"{held['handoffs']}",
        f"{size(held['held_bytes'])} held, of {size(held['budget_bytes'])} that may be",
    )
    for name in ("workers", "links"):
        counts = {state: count for state, count in answer[name].items() if count}
        table.add_row(
            name, f"{sum(counts.values())}", ", ".join(f"{count} {state}" for state, count in counts.items())
        )
    return table


def _groups(groups: list[Answer]) -> Table:
    table = Table(title="groups", title_justify="left", pad_edge=False, box=None, header_style="dim")
    for name in ("group", "role", "ranks", "in flight", "lag", "state"):
        table.add_column(name, justify="right" if name in {"ranks", "in flight", "lag"} else "left")
    for group in groups:
        missing = ", ".join(group["missing"])
        state = Text("ready", "green") if group["ready"] else Text(f"misses {missing}", "red")
        table.add_row(
            group["name"],
            group["role"],
            str(group["world_size"]),
            str(group["in_flight"]),
            str(group["lag"]),
            state,
        )
    return table


def handoffs(found: list[Answer]) -> Table:
    """Show handoffs, one a line, with what each waits for or why it failed."""
    found = _readable(found)
    table = Table(title="handoffs", title_justify="left", pad_edge=False, box=None, header_style="dim")
    for name in ("room", "state", "age", "after prefill", "remaining"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    table.add_column("from -> to", overflow="fold")
    table.add_column("waits for", overflow="fold")
    for handoff in found:
        table.add_row(
            handoff["room"],
            Text(handoff["state"], _COLOURS[handoff["state"]]),
            duration(handoff["age_s"]),
            duration(handoff["after_prefill_s"]),
            duration(handoff["remaining_s"]),
            f"{handoff['prefill'] or '?'} -> {handoff['decode'] or '?'}",
            _waits(handoff),
        )
    return table


def _waits(handoff: Answer) -> str:
    failure = handoff["failure"]
    if failure is None:
        return str(handoff["missing"])
    held = f"; not quiet: {', '.join(handoff['held'])}" if handoff["held"] else ""
    return f"{failure['reason']}: {failure['message']}{held}"


def story(answer: Answer) -> RenderableType:
    """Show all that is known of a room."""
    answer = _readable(answer)
    if "story" not in answer:
        verdict = "succeeded" if answer["failure"] is None else _verdict(answer["failure"])
        return Text(f"room {answer['room']}, attempt {answer['attempt']}, a while ago: {verdict}")
    handoff = answer["handoff"]
    parts: list[RenderableType] = [_headline(answer), _steps(answer)]
    if handoff["failure"] is not None:
        parts.append(Text(_verdict(handoff["failure"]), "red"))
        failure = handoff["failure"]
        again = "trying again may help" if failure["retryable"] else "trying again does not help"
        parts.append(Text(f"whose fault: {failure['fault']}; {again}"))
    if handoff["missing"]:
        parts.append(Text(f"waits for {handoff['missing']}", "yellow"))
    if answer["ended_s"] is not None:
        held = ", ".join(handoff["held"])
        parts.append(Text(f"pages not released: {held}" if held else "all pages are released"))
    if answer["ranks"]:
        parts.append(_words(answer["ranks"]))
    if answer["moves"]:
        parts.append(_moves(answer["moves"]))
    return Group(*parts)


def _headline(answer: Answer) -> Text:
    handoff = answer["handoff"]
    where = f"{handoff['prefill'] or '(no prefill yet)'} -> {handoff['decode'] or '(no decode yet)'}"
    ended = "" if answer["ended_s"] is None else f", {duration(answer['ended_s'])} ago"
    clock = ""
    if handoff["after_prefill_s"] is not None:
        clock = f", {duration(handoff['after_prefill_s'])} after prefill"
    if handoff["remaining_s"] is not None:
        clock += f", {duration(handoff['remaining_s'])} until its deadline"
    return Text.assemble(
        (f"room {handoff['room']}", "bold"),
        f", attempt {handoff['attempt']}, {where}: ",
        (handoff["state"], _COLOURS[handoff["state"]]),
        f"{ended}; {duration(handoff['age_s'])} old{clock}; {size(handoff['moved_bytes'])} moved, "
        f"{size(handoff['moving_bytes'])} on the way",
    )


def _verdict(failure: Answer) -> str:
    origin = f" (from {failure['origin']})" if failure["origin"] else ""
    return f"failed: {failure['reason']}{origin}: {failure['message']}"


def _steps(answer: Answer) -> Table:
    table = Table.grid(padding=(0, 2))
    for step in answer["story"]:
        table.add_row(f"{step['at_s']:>10.4f} s", Text(step["state"], _COLOURS[step["state"]]), step["cause"])
    return table


def _words(ranks: list[Answer]) -> Table:
    table = Table(pad_edge=False, box=None, header_style="dim")
    for name in ("rank", "has said", "pages", "last heard"):
        table.add_column(name, justify="right" if name in {"pages", "last heard"} else "left")
    for rank in ranks:
        heard = "never" if rank["silent_s"] is None else f"{duration(rank['silent_s'])} ago"
        said = rank["said"] if rank["alive"] else f"{rank['said']}; it is not there"
        table.add_row(rank["rank"], said, str(rank["pages"]), heard)
    return table


def _moves(moves: list[Answer]) -> Table:
    table = Table(pad_edge=False, box=None, header_style="dim")
    for name in ("move", "link", "link is", "bytes"):
        table.add_column(name, justify="right" if name in {"move", "bytes"} else "left")
    for move in moves:
        table.add_row(str(move["move"]), move["link"], move["link_state"], size(move["size_bytes"]))
    return table


def log_line(entry: Answer) -> Text:
    """Show a line of the log."""
    shown = _readable(entry)
    if "exception" in entry:
        shown["exception"] = printable_lines(str(entry["exception"]))
    rest = " ".join(
        f"{key}={value}" for key, value in shown.items() if key not in {"timestamp", "level", "event"}
    )
    level = str(shown.get("level", ""))
    return Text.assemble(
        (f"{shown.get('timestamp', '')} ", "dim"),
        (f"{level:7} ", _COLOURS.get(level, "")),
        (f"{shown.get('event', '')} ", "bold"),
        rest,
    )


def _readable(value: Any) -> Any:  # noqa: ANN401 - whatever JSON says
    """Return a part of an answer with all texts in it as a terminal may have them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_readable(part) for part in value]
    if isinstance(value, dict):
        return {_readable(name): _readable(part) for name, part in value.items()}
    return value
