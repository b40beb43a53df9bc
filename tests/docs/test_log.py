"""The page on the log has every line that a coordinator can write, with its level and its keys."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from coordinator.log_stream import MAX_RECENT
from coordinator.logs import MAX_LINE_BYTES
from coordinator.worker.settings import ExitCode
from coordinator.worker.supervisor import _HOPELESS
from tests.docs.markdown import ROOT, table, ticked

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = ROOT / "docs" / "log.md"
_LEVELS: Final = {"debug", "info", "warning", "error"}
_EVENT: Final = re.compile(r"[a-z]+\.[a-z_]+")
#: The steps of a handoff, which are logged by ``trail.step``.
_STEP: Final = "step"
#: What becomes of the log's file, which is logged by ``logs._tell_of_file``.
_TELL: Final = "_tell"


def texts(node: ast.expr) -> Iterator[str]:
    """The texts that an argument may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)


def logged() -> Iterator[tuple[str, str, set[str]]]:
    """Every event of our own log in the code: its level, and the keys that stand there by name."""
    for path in sorted((ROOT / "coordinator").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            if node.func.attr == _STEP:
                yield from ((event, "info", set()) for event in texts(node.args[-1]))
            elif node.func.attr == _TELL:
                found = (event for event in texts(node.args[0]) if _EVENT.fullmatch(event))
                yield from ((event, "warning", {"file", "why"}) for event in found)
            elif node.func.attr in _LEVELS and "log" in ast.unparse(node.func.value):
                keys = {"exception" if k.arg == "exc_info" else k.arg for k in node.keywords if k.arg}
                yield from (
                    (event, node.func.attr, keys) for event in texts(node.args[0]) if _EVENT.fullmatch(event)
                )
    yield "log.dropped", "warning", {"lines"}


def rows() -> list[list[str]]:
    """The table of the page."""
    return table(PAGE.read_text(), "event")


def test_every_line_stands_on_the_page_with_its_level() -> None:
    told = {event.strip("`"): level for event, level, *_ in rows()}
    assert told == {event: level for event, level, _ in logged()}


def test_the_keys_of_each_line_stand_beside_it() -> None:
    told: dict[str, set[str]] = {}
    former: set[str] = set()
    for event, _, keys, _ in rows():
        former = told[event.strip("`")] = set(ticked(keys)) | (former if "the same" in keys else set())
    assert {event: keys - told[event] for event, _, keys in logged() if not keys <= told[event]} == {}


def test_what_would_not_be_on_the_page_is_found() -> None:
    found = {event for event, *_ in logged()}
    assert {"handoff.opened", "group.not_ready", "log.dropped", "release.unquiet", "worker.died"} <= found
    assert not [event for event in found if not _EVENT.fullmatch(event)]


def test_the_ends_of_a_worker_are_told() -> None:
    told = dict(re.findall(r"(\d)\s`([a-z]+)`", PAGE.read_text()))
    assert told == {str(code.value): code.name.lower() for code in ExitCode if code is not ExitCode.STOPPED}
    assert {code.value for code in _HOPELESS} == {2, 3, 4, 5}
    assert "After 2 to 5 it is not started again." in PAGE.read_text()


def test_the_bounds_on_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert f"its last {MAX_RECENT:,} lines" in text
    assert f"over {MAX_LINE_BYTES >> 10} KiB" in text
