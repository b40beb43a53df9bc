"""The demo, whole: what it shows, what it writes, and that it fails when something is wrong."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from backends import registry
from backends.base import BackendUnavailableError
from coordinator.sim.demo import DemoOptions, run
from coordinator.sim.engine import Sabotage
from tests.backends.rigs import needs_mooncake, needs_nixl

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.processes import Programs

KEYS = [
    *("backend", "handoffs", "succeeded", "failed", "unresolved", "corrupt_pages", "bytes_moved"),
    *("seconds", "p50_ms", "p99_ms", "heal_s", "ranks_agree"),
]


def show(tmp_path: Path, options: DemoOptions) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "result.json"
    code = run(DemoOptions(**{**_fields(options), "json_path": path}))
    return code, json.loads(path.read_text())


def _fields(options: DemoOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__slots__}


def check_good(code: int, result: dict[str, Any], backend: str, handoffs: int) -> None:
    assert list(result) == KEYS
    assert result["backend"] == backend
    assert result["handoffs"] == handoffs
    assert result["succeeded"] + sum(result["failed"].values()) == handoffs
    assert result["succeeded"] > 0
    assert result["unresolved"] == 0
    assert result["corrupt_pages"] == 0
    assert result["ranks_agree"] is True
    # Decode was killed with handoffs in flight, and handoffs to its next incarnation succeeded.
    assert set(result["failed"]) & {"peer_lost", "peer_restarted"}
    assert result["heal_s"] > 0
    assert result["bytes_moved"] > 0
    assert 0 < result["p50_ms"] <= result["p99_ms"]
    assert code == 0


def test_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decode dies with handoffs in flight and comes back (case C07)."""
    code, result = show(tmp_path, DemoOptions(backend="loopback", handoffs=60))
    check_good(code, result, "loopback", 60)
    output = capsys.readouterr().out
    for text in (
        "decode-0 is killed now",
        "first handoff to it succeeded",
        "60 handoffs by loopback",
        "All is well",
    ):
        assert text in output


@pytest.mark.parametrize(
    ("backend", "prefill_tp", "decode_tp", "layout"),
    [
        ("loopback", 2, 4, "DeepSeek-V3"),
        pytest.param("nixl", 4, 2, "", marks=[pytest.mark.nixl]),
    ],
)
def test_engines_of_unequal_size(
    tmp_path: Path, backend: str, prefill_tp: int, decode_tp: int, layout: str
) -> None:
    """Every page of every decode rank is checked, head by head (case C34)."""
    if backend == "nixl" and find_spec("nixl_cu12") is None:
        pytest.skip("there is no nixl wheel here")
    options = DemoOptions(backend, prefill_tp, decode_tp, layout, handoffs=30)
    check_good(*show(tmp_path, options), backend, 30)


def test_without_enough_shared_memory_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=1 << 20))
    assert run(DemoOptions("loopback")) == 1
    assert "has 1048576 bytes free, 16 pages of 4 ranks take 1048576" in capsys.readouterr().out


def test_the_coordinator_is_killed_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = DemoOptions(backend="loopback", handoffs=60, kill_coordinator=True)
    code, result = show(tmp_path, options)
    output = capsys.readouterr().out
    assert code == 0, output
    assert result["unresolved"] == result["corrupt_pages"] == 0
    assert result["ranks_agree"] is True
    assert result["handoffs"] == 60
    failed = result["failed"]
    assert isinstance(failed, dict)
    assert set(failed) <= {"coordinator_restarted"}
    recover_s = result["recover_s"]
    assert isinstance(recover_s, float)
    assert recover_s > 0
    for text in ("the coordinator is killed now", "time to recover", "All is well"):
        assert text in output


@pytest.mark.parametrize(
    ("backend", "package"),
    [
        pytest.param("mooncake", "mooncake", marks=pytest.mark.mooncake),
        pytest.param("nixl", "nixl_cu12", marks=pytest.mark.nixl),
    ],
)
def test_native_engines(tmp_path: Path, backend: str, package: str) -> None:
    """The same over a native engine (case C07)."""
    if find_spec(package) is None:
        pytest.skip(f"there is no {backend} wheel here")
    code, result = show(tmp_path, DemoOptions(backend=backend, handoffs=60))
    check_good(code, result, backend, 60)


@pytest.mark.parametrize(
    ("backend", "kill"),
    [
        ("loopback", "decode"),
        pytest.param("mooncake", "decode", marks=needs_mooncake),
        pytest.param("nixl", "coordinator", marks=needs_nixl),
    ],
)
def test_ranks_that_run_their_workers_themselves(tmp_path: Path, backend: str, kill: str) -> None:
    """Cases C07 and C16, over memory that no other process has. Every rank's process ends with code 0."""
    options = DemoOptions(
        backend=backend, handoffs=40, hosting="rank", kill_coordinator=kill == "coordinator"
    )
    code, result = show(tmp_path, options)
    assert code == 0, result
    assert result["unresolved"] == result["corrupt_pages"] == 0
    assert result["ranks_agree"] is True
    assert result["succeeded"] > 0
    if kill == "coordinator":
        reasons = {"coordinator_restarted"}
    else:
        # The last one is that of requests which decode had queued, and the coordinator had not heard of.
        reasons = {"peer_lost", "peer_restarted", "transport", "cancelled_by_prefill"}
    assert set(result["failed"]) <= reasons


def test_a_corrupt_page_a_missing_release_and_a_rank_that_differs_are_all_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DemoOptions(
        backend="loopback",
        handoffs=20,
        settle_s=4.0,
        sabotage={"prefill-0": Sabotage.SKIP_RELEASE, "decode-0": Sabotage.CORRUPT_PAGE},
    )
    code, result = show(tmp_path, options)
    assert code == 1
    assert result["corrupt_pages"] >= 1
    assert result["unresolved"] == 1
    assert result["ranks_agree"] is False
    output = capsys.readouterr().out
    assert "Something is wrong" in output
    assert "release at prefill-0 #1 rank 1" in output
    assert "prefill-0 #1: ranks [0, 1] are not alike" in output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (DemoOptions("loopback", 2, 3, "Llama-3.1-8B"), "impossible for decode: kv_heads is 8, must divide"),
        (DemoOptions("loopback", layout="Llama-4"), "there is no layout 'Llama-4'"),
        (DemoOptions("no-such"), "there is no backend named 'no-such'"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(
    options: DemoOptions, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(options) == 2
    assert sentence in capsys.readouterr().out


def test_what_to_install_is_told_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> None:
        message = f"install what it needs, for example pip install 'kv-coordinator[{name}]'"
        raise BackendUnavailableError(message)

    monkeypatch.setattr(registry, "load", load)
    assert run(DemoOptions("mooncake")) == 2
    assert "'kv-coordinator[mooncake]'" in capsys.readouterr().out


def test_a_result_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(DemoOptions("loopback", json_path=tmp_path / "no" / "result.json")) == 2
    assert "there is no such directory" in capsys.readouterr().out
    assert run(DemoOptions("loopback", json_path=tmp_path)) == 2
    assert "it is a directory" in capsys.readouterr().out


@pytest.mark.parametrize("killed", ["decode", "coordinator"])
def test_too_few_handoffs_to_show_anything_are_refused(
    killed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two, none is left for after the kill: nothing would have to succeed, or could."""
    options = DemoOptions("loopback", handoffs=2, kill_coordinator=killed == "coordinator", settle_s=1.0)
    assert run(options) == 2
    assert "2 handoffs show nothing" in capsys.readouterr().out


def test_an_interrupted_demo_cleans_up(programs: Programs, short_dir: Path) -> None:
    program = programs.python(
        *("-m", "coordinator", "demo", "--backend", "loopback", "--handoffs", "100000"),
        environment={"TMPDIR": str(short_dir)},
    )
    program.says("All ranks are ready", timeout_s=30)
    program.process.send_signal(signal.SIGINT)
    # An impatient person, or a supervisor, does not disturb the cleaning up.
    program.process.send_signal(signal.SIGTERM)
    assert program.wait(20) == 130
    assert "Interrupted" in program.output()
    assert not list(short_dir.iterdir())
