"""The tables in the README say what the code says."""

from __future__ import annotations

import inspect
import io
import re
import tomllib
from typing import TYPE_CHECKING, get_args

import pytest
import typer
from pydantic import BaseModel
from rich.console import Console

from backends import registry
from coordinator import cli
from coordinator.client import DecodeRank, PrefillRank, RankState
from coordinator.config import Config
from coordinator.events import State
from coordinator.http.routes import TABLE as ROUTES
from coordinator.messages import Role
from coordinator.metrics import TABLE
from coordinator.reasons import Reason
from coordinator.routes import RouteState
from coordinator.sim import demo
from coordinator.sim.display import show
from coordinator.sim.summary import Summary
from coordinator.worker.supervisor import WorkerState
from tests.docs.markdown import ROOT, blocks, readme, section, source, table, ticked

if TYPE_CHECKING:
    from collections.abc import Iterator


def settings(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every key of the configuration with its default; ``...`` where there is none."""
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if _is_table(kind)]
        if inner:
            yield from settings(inner[0], f"{prefix}{name}.")
        else:
            default = ... if field.is_required() else field.default
            yield f"{prefix}{name}", list(default) if isinstance(default, tuple) else default


def _is_table(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_every_key_of_the_configuration_stands_there_with_its_default() -> None:
    rows = table(section("Configuration"), "key")
    # A default that is no value is told in words.
    told = {
        key.strip("`"): tomllib.loads(f"x = {default.strip('`')}")["x"] if "`" in default else default
        for key, default, _ in rows
    }
    actual = dict(settings())
    assert list(told) == list(actual)
    words = {"none": ..., "a tenth of the pools": None, "no file": None, "never": None}
    assert {key: words.get(str(value), value) for key, value in told.items()} == actual


def test_every_metric_stands_on_its_page() -> None:
    rows = table((ROOT / "docs" / "metrics.md").read_text(), "name")
    assert [tuple(row) for row in rows] == [
        (f"`{m.full_name}`", m.kind, ", ".join(f"`{name}`" for name in m.labels) or "-", m.help)
        for m in TABLE
    ]


def test_the_states_of_the_labels_stand_on_the_page() -> None:
    rows = table((ROOT / "docs" / "metrics.md").read_text(), "metric")
    told = {(name.strip("`"), label.strip("`")): set(ticked(values)) for name, label, values in rows}
    in_flight = {state for state in State if not state.terminal}
    assert told["kv_coordinator_handoffs_in_flight", "state"] == in_flight
    assert told["kv_coordinator_links", "state"] == set(RouteState)
    assert told["kv_coordinator_workers", "state"] == set(WorkerState)
    assert told["kv_coordinator_ranks", "role"] == set(Role)
    labels = {metric.full_name: set(metric.labels) for metric in TABLE}
    assert [row for row in told if row[1] not in labels[row[0]]] == []


def test_every_alert_has_its_line() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "configs" / "prometheus" / "alerts.yaml").read_text())
    rows = table(section("Operating it"), "what you see")
    told = [word for what, *_ in rows for word in ticked(what) if word.startswith("KvCoordinator")]
    assert sorted(told) == sorted(alerts)
    assert all(len(row) == 3 for row in rows)


def test_every_path_of_http_stands_there_with_what_it_takes() -> None:
    rows = table(section("Operating it"), "path")
    told = " ".join(cell for row in rows for cell in row)
    for route in ROUTES:
        assert route.path.replace("{room}", "ROOM") in told
        assert [name for name in route.query if f"`{name}`" not in told] == [], route.path


def test_every_command_and_variable_stands_there() -> None:
    text = readme()
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined] # it is a group
    assert [name for name in commands if f"kv-coordinator {name}" not in text] == []
    variables = {
        parameter.envvar for command in commands.values() for parameter in command.params if parameter.envvar
    }
    assert len(variables) > 1
    assert [name for name in variables if f"`{name}`" not in text] == []


def test_every_reason_stands_there_with_its_fault() -> None:
    rows = table(section("When something fails"), "reason")
    assert [(name.strip("`"), fault, again) for name, fault, again, _ in rows] == [
        (reason.value, reason.fault.value, "yes" if reason.retryable else "no") for reason in Reason
    ]


def test_what_is_called_reserved_is_not_used_and_the_rest_is() -> None:
    """It fails when a reserved thing begins to work: then the README is behind."""
    rows = table(section("When something fails"), "reason")
    reserved = {name.strip("`") for name, *_, when in rows if when.startswith("reserved")}
    given = {reason.value for reason in Reason if _uses(rf"\bReason\.{reason.name}\b") > 1}
    assert reserved == {reason.value for reason in Reason} - given


def _uses(pattern: str) -> int:
    """How often it stands in the code; the table of verdicts names each reason once."""
    return len(re.findall(pattern, source()))


def test_the_reasons_of_the_faults_are_all_that_are_given() -> None:
    text = section("When something fails")
    heard = {word for _, hears, *_ in table(text, "what fails") for word in ticked(hears)}
    reserved = {name.strip("`") for name, *_, when in table(text, "reason") if when.startswith("reserved")}
    assert {reason.value for reason in Reason} - reserved <= heard
    others = {*Reason, *RankState, *dict(settings()), "rank.state"}
    assert heard <= others


def test_the_log_lines_of_the_faults_exist() -> None:
    rows = table(section("When something fails"), "what fails")
    events = {event for *_, log in rows for event in ticked(log)}
    assert len(events) > 10
    assert {event for event in events if f'"{event}"' not in source()} == set()


@pytest.mark.parametrize(
    "word",
    sorted({word for word in ticked(readme()) if re.fullmatch(r"[a-z]+\.[a-z_]+(\(.*\))?", word)}),
)
def test_a_dotted_name_means_something(word: str) -> None:
    """It is a key of the configuration, a line of the log, part of a client, or a file."""
    owner, _, name = word.partition("(")[0].partition(".")
    assert (
        word in dict(settings())
        or f'"{word}"' in source()
        or (owner == "rank" and (hasattr(PrefillRank, name) or hasattr(DecodeRank, name)))
        or (ROOT / word).exists()
        or word in {"server.key", "server.key_secret"}
    )


def test_the_backends_are_those_that_are_there() -> None:
    line = section("Limits of today").partition("- The backends are")[2].partition(". ")[0]
    assert ticked(line) == registry.names()


def test_the_states_of_a_client_are_all_named() -> None:
    named = set(ticked(section("Using it from an engine")))
    assert {state.value for state in RankState} <= named


def test_what_a_rank_can_be_told_is_all_named() -> None:
    named = {word.partition("(")[0].removeprefix("rank.") for word in ticked(readme())}
    said = {
        name
        for kind in (PrefillRank, DecodeRank)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    # These stand in the two programs.
    assert said - named <= {"wait", "wait_ready", "refusals", "close"}
    assert {"send", "offer", "open", "extend", "cancel", "drain"} <= said & named


def test_the_exit_codes_are_those_of_the_commands() -> None:
    codes = [int(code) for code, _ in table(section("Exit codes"), "code")]
    assert codes == [cli.OK, cli.FAILED, cli.UNUSABLE, cli.NO_ANSWER, cli.INTERRUPTED]
    assert demo._INTERRUPTED == cli.INTERRUPTED


def test_the_shown_demo_has_the_rows_of_the_demo() -> None:
    summary = Summary(
        backend="nixl",
        handoffs=2,
        succeeded=1,
        failed={"peer_lost": 1},
        unresolved=0,
        corrupt_pages=0,
        bytes_moved=1,
        seconds=1.0,
        p50_ms=1.0,
        p99_ms=1.0,
        heal_s=1.0,
        ranks_agree=True,
        failed_everywhere_s=1.0,
        restart_s=1.0,
    )
    console = Console(file=io.StringIO(), width=80)
    show(console, summary)
    assert isinstance(console.file, io.StringIO)
    (printed,) = [code for code in blocks(section("Try it")) if "│" in code]
    assert _labels(printed) == _labels(console.file.getvalue())
    assert printed.splitlines()[-1] == console.file.getvalue().splitlines()[-1]


def _labels(text: str) -> list[str]:
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    return [cell for cell in cells if cell]
