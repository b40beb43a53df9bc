"""What benches have in common: ratios with their spread, and the figures on docs/performance.md."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from scripts.benches import at_least
from scripts.benches.support import figures
from scripts.benches.support.pairs import percentile, ratio

if TYPE_CHECKING:
    from pathlib import Path


def test_a_ratio_is_that_of_each_pair_not_of_the_sides() -> None:
    """A host that becomes ten times slower in the middle changes both sides of a pair."""
    found = ratio([(2, 1), (20, 10), (30, 10), (3.0, 1)])
    assert found == {"ratio": 2.5, "ratio_low": 2.0, "ratio_high": 3.0}
    assert ratio([(6, 2)], "times") == {"times": 3, "times_low": 3, "times_high": 3}


def test_a_percentile_lies_within_the_values() -> None:
    assert percentile([1.0, 2.0, 3.0], 50) == 2
    assert percentile([5.0, 5.0], 99) == 5


def test_figures_stand_on_the_page_beside_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ModuleType("made", "What it measures.\n\nMore.")
    vars(bench).update(TARGETS={"b.ratio": at_least(0.9)})
    monkeypatch.setattr(figures, "load", {"made": bench}.get)
    written = list(
        figures.lines({"made": {"x": 1234.5, "a": {"ratio": 0.5}, "b": {"ratio": 0.8}}}, "A host.")
    )
    assert written == [
        *("A host.", "", "### made", "", "What it measures.", ""),
        *("| metric | figure |", "| --- | ---: |", "| `x` | 1,234 |", ""),
        *("| | `ratio` |", "| --- | ---: |"),
        *("| `a` | 0.5 |", "| `b` | 0.8 (at least 0.9: missed) |", ""),
    ]


def test_only_what_is_between_the_marks_is_written_anew() -> None:
    page = f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n"
    once = figures.replaced(page, "new")
    assert once == f"before\n{figures.BEGIN}\n\nnew\n{figures.END}\nafter\n"
    assert figures.replaced(once, "new") == once


@pytest.mark.parametrize("page", ["", figures.BEGIN, figures.END])
def test_a_page_that_lacks_a_mark_is_left_alone(page: str) -> None:
    with pytest.raises(ValueError, match="lacks one of the marks"):
        figures.replaced(page, "new")


def test_a_quick_look_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "figures.json", tmp_path / "page.md"
    page.write_text("as it was")
    file.write_text('{"drain": {"x": 1, "quick": 1}}')
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["figures", str(file), "--load", "nothing else ran"])
    assert figures.main() == 2
    assert "Of drain nothing but a quick look was taken" in capsys.readouterr().err
    assert page.read_text() == "as it was"


def test_the_page_has_the_marks() -> None:
    page = figures.PAGE.read_text()
    assert page.index(figures.BEGIN) < page.index(figures.END)


def test_the_host_is_described() -> None:
    assert "GiB, Linux" in figures.host("nothing else ran")
    assert figures.host("nothing else ran").endswith("; nothing else ran.")
