"""A replay, whole: what it shows and writes, what it survives, and that it fails when something is wrong."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.replay import plot
from coordinator.replay.command import ReplayOptions, run
from coordinator.sim.engine import Sabotage

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.processes import Programs

SMALL = Path(__file__).parents[2] / "configs" / "replay" / "small.jsonl"
#: 48 s of a trace in 2.4 s; of decode, of which there are two, each has one rank: there are few processes.
OPTIONS = ReplayOptions(SMALL, speed=20.0, scale_bytes=512, prefill_groups=1, decode_tp=1)

FAULTS = """
[[restart]]
at_s = 16
group = "decode-0"

[[stop]]
at_s = 8
group = "decode-1"
rank = 0
for_s = 0.2

[[abort]]
at_s = 12
by = "decode"
requests = 1

[[abort]]
at_s = 24
by = "prefill"
requests = 1
"""


def replay(tmp_path: Path, options: ReplayOptions) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "result.json"
    code = run(replace(options, json_path=file))
    result: dict[str, Any] = json.loads(file.read_text())
    return code, result


def test_decode_is_restarted_a_rank_stands_still_and_clients_go_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every request ends, every page that arrives is right, all ranks agree (case C07)."""
    faults, png = tmp_path / "faults.toml", tmp_path / "plot.png"
    faults.write_text(FAULTS)
    code, result = replay(tmp_path, replace(OPTIONS, faults_path=faults, png_path=png))
    output = capsys.readouterr().out
    assert code == 0, output
    assert result["handoffs"] == 80
    assert result["succeeded"] + sum(result["failed"].values()) == 80
    assert result["succeeded"] > 20
    assert result["unresolved"] == result["corrupt_pages"] == 0
    assert result["ranks_agree"] is True
    assert result["prompt_pages"] > result["prefix_pages"] >= 0
    assert set(result["memory_bytes"]) == {"coordinator", "workers", "engines", "router"}
    assert all(size_bytes > 1 << 20 for size_bytes in result["memory_bytes"].values())
    assert len(result["faults"]) == 4
    for text in (
        "decode-0 #1 is killed now",
        "decode-0 #2 is ready",
        "decode-1 rank 0 stands still for 0.2 s",
        "decode gives up rooms",
        "80 handoffs by loopback, at 20 times the speed of the trace",
        "Milliseconds from prefill-complete to success",
        "All is well",
    ):
        assert text in output
    assert png.read_bytes().startswith(b"\x89PNG")


def test_an_answer_may_be_longer_than_anything_is_waited_for(
    tmp_path: Path, write: Callable[[list[dict[str, Any]]], Path]
) -> None:
    trace = write([{"timestamp": 0, "input_length": 512, "output_length": 160}])
    options = replace(OPTIONS, trace_path=trace, speed=1.0, prefill_tp=1, decode_groups=1, settle_s=2.0)
    code, result = replay(tmp_path, options)
    assert (code, result["succeeded"]) == (0, 1)
    assert result["seconds"] > 4


def test_a_corrupt_page_and_a_missing_release_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sabotage = {"prefill-0": Sabotage.SKIP_RELEASE, "decode-0": Sabotage.CORRUPT_PAGE}
    options = replace(OPTIONS, first_s=10.0, settle_s=6.0, sabotage=sabotage)
    code, result = replay(tmp_path, options)
    assert code == 1
    assert result["corrupt_pages"] >= 1
    assert result["unresolved"] == 1
    assert result["ranks_agree"] is False
    assert "nothing has ended or begun for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (replace(OPTIONS, trace_path=Path("none.jsonl")), "none.jsonl: cannot be read: No such file"),
        (replace(OPTIONS, faults_path=SMALL), "small.jsonl: "),
        (replace(OPTIONS, layout="Llama-4"), "there is no layout 'Llama-4'"),
        (replace(OPTIONS, backend="no-such"), "there is no backend named 'no-such'"),
        (replace(OPTIONS, decode_tp=3), "kv_heads is 8, must"),
        (replace(OPTIONS, scale_bytes=8), "a page of this layout takes 512 bytes at least; 8 are too few"),
        (replace(OPTIONS, scale_bytes=1 << 21), "would fit (--scale)"),
        (replace(OPTIONS, png_path=Path("/none/plot.png")), "there is no such directory"),
        (replace(OPTIONS, json_path=Path("/proc")), "/proc cannot be written: it is a directory"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    options: ReplayOptions, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(options) == 2
    assert sentence in capsys.readouterr().out


def test_without_the_libraries_a_plot_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    assert run(replace(OPTIONS, png_path=Path("plot.png"))) == 2
    assert "needs the extra `replay`" in capsys.readouterr().out


def test_an_interrupted_replay_cleans_up(programs: Programs, short_dir: Path) -> None:
    program = programs.python(
        *("-m", "coordinator", "replay", str(SMALL), "--prefill-groups", "1", "--decode-groups", "1"),
        environment={"TMPDIR": str(short_dir)},
    )
    program.says("All ranks are ready", timeout_s=30)
    program.process.send_signal(signal.SIGINT)
    assert program.wait(20) == 130
    assert "Interrupted" in program.output()
    assert not list(short_dir.iterdir())
