"""``scripts/bench``: names, figures, targets, and the file of figures."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import uvloop

from scripts.benches import Arguments, Metrics, at_least, at_most
from scripts.benches import __main__ as bench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Benches of our own in place of the real ones."""
    known: dict[str, ModuleType] = {}
    monkeypatch.setattr(bench, "files", lambda: sorted(known))
    monkeypatch.setattr(bench, "load", known.get)
    return known


def make(run: object, **attributes: object) -> ModuleType:
    module = ModuleType("made", "What it measures.\n\nMore.")
    vars(module).update(run=run, **attributes)
    return module


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    return bench.main()


def test_without_a_name_all_benches_are_listed(
    benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benches["idle"] = make(lambda _: {})
    assert call(monkeypatch) == 0
    assert "  idle         What it measures.\n" in capsys.readouterr().out


def test_an_unknown_name_is_refused_before_anything_is_measured(
    benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Arguments] = []
    benches["idle"] = make(measured.append)
    assert call(monkeypatch, "idle", "idel") == 2
    err = capsys.readouterr().err
    assert "There is no bench 'idel'." in err
    assert "idle" in err
    assert measured == []


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    benches: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    measured: list[Arguments] = []
    benches["idle"] = make(measured.append)
    assert call(monkeypatch, "idle", "--json", str(tmp_path / "none" / "figures.json")) == 2
    assert "there is no such directory" in capsys.readouterr().err
    assert call(monkeypatch, "idle", "--json", str(tmp_path)) == 2
    assert "it is a directory" in capsys.readouterr().err
    assert measured == []


def test_figures_are_shown_beside_their_targets_and_written(
    benches: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    benches["drain"] = make(lambda _: {"idle_ns": 600.0, "free": 1.5}, TARGETS={"idle_ns": at_most(500)})
    benches["bandwidth"] = make(lambda _: {"nixl": {"ratio": 0.97}}, TARGETS={"ratio": at_least(0.95)})
    file = tmp_path / "figures.json"
    assert call(monkeypatch, "drain", "bandwidth", "--json", str(file)) == 0
    assert json.loads(file.read_text()) == {
        "drain": {"idle_ns": 600.0, "free": 1.5},
        "bandwidth": {"nixl": {"ratio": 0.97}},
    }
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    (missed,) = [line for line in lines if "idle_ns" in line]
    assert "600" in missed
    assert "at most 500: MISSED" in missed
    (met,) = [line for line in lines if "nixl.ratio" in line]
    assert "0.97" in met
    assert "at least 0.95: met" in met


def test_a_bench_that_fails_costs_no_figure_of_another(
    benches: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(_: Arguments) -> Metrics:
        message = "no luck"
        raise RuntimeError(message)

    benches["bad"] = make(fail)
    benches["good"] = make(lambda _: {"x": 1.0})
    file = tmp_path / "figures.json"
    assert call(monkeypatch, "bad", "good", "--json", str(file)) == 1
    assert json.loads(file.read_text()) == {"good": {"x": 1.0}}
    err = capsys.readouterr().err
    assert "no luck" in err
    assert "Failed: bad" in err


def test_a_coroutine_is_measured_on_uvloop_and_gets_the_arguments(
    benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[bool, bool]] = []

    async def run(arguments: Arguments) -> Metrics:
        seen.append((arguments.quick, isinstance(asyncio.get_running_loop(), uvloop.Loop)))
        return {"x": 2.0}

    benches["loop"] = make(run)
    file = tmp_path / "figures.json"
    assert call(monkeypatch, "loop", "--quick", "--json", str(file)) == 0
    assert seen == [(True, True)]
    assert json.loads(file.read_text()) == {"loop": {"x": 2.0, "quick": 1}}


def test_every_bench_of_the_project_can_be_loaded() -> None:
    found = {name: bench.load(name) for name in bench.files()}
    benches = {name: module for name, module in found.items() if module is not None}
    assert set(benches) == {
        *("bandwidth", "deadline", "drain", "fairness", "fanout", "footprint", "heal", "idle", "phases"),
        *("plan", "polling", "sglang", "soak", "throughput"),
    }
    assert all(callable(module.run) and module.__doc__ for module in benches.values())
