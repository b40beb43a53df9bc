"""The command line: what each command says, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer

from backends import registry
from backends.base import BackendUnavailableError
from coordinator import __version__, cli
from coordinator.errors import WorkerError
from tests.support.leftovers import sockets

if TYPE_CHECKING:
    from backends.base import Backend
    from tests.support.processes import Program, Programs

CONFIGS = Path(__file__).parents[2] / "configs"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``kv-coordinator`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "coordinator", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "100"},
    )


def words(text: str) -> str:
    """The text without boxes and line breaks."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())


def test_the_version_is_told() -> None:
    done = command("version")
    assert (done.returncode, done.stdout) == (0, f"kv-coordinator {__version__}\n")


def test_the_installed_command_is_the_same() -> None:
    program = Path(sys.executable).with_name("kv-coordinator")
    done = subprocess.run([program, "version"], capture_output=True, text=True, check=True)
    assert done.stdout == command("version").stdout


@pytest.mark.parametrize("name", ["serve", "check", "demo", "plan"])
def test_help_tells_the_exit_codes(name: str) -> None:
    done = command(name, "--help")
    assert done.returncode == 0
    assert "Exit codes: 0" in words(done.stdout)


def test_no_help_is_taken_for_markup() -> None:
    """What stands in brackets after a space would not be shown, and backticks would be."""
    group = typer.main.get_command(cli.app)
    for name, chosen in group.commands.items():  # type: ignore[attr-defined] # it is a group
        texts = [chosen.help, chosen.epilog, *(getattr(parameter, "help", "") for parameter in chosen.params)]
        assert [text for text in texts if text and re.search(r"\[[a-z]|`", text)] == [], name


def test_check_says_who_moves_the_pages() -> None:
    assert "loopback, hosted by the coordinator\n" in command("check").stdout
    done = command("check", "--config", str(CONFIGS / "sglang.toml"))
    assert "external, the engine moves the pages by itself\n" in done.stdout
    assert "hosted by" not in done.stdout


def test_without_a_command_the_help_is_shown() -> None:
    done = command()
    assert done.returncode == 2
    for name in ("serve", "check", "demo", "version"):
        assert f" {name} " in words(done.stdout + done.stderr)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_check_says_what_a_good_configuration_does(path: Path) -> None:
    done = command("check", "--config", str(path))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{path} can be used.\n")
    assert "listens on   ipc:///run/kv-coordinator/control" in done.stdout
    assert "300 s after prefill" in done.stdout
    assert done.stderr == ""


def test_check_knows_the_built_in_default() -> None:
    done = command("check")
    assert done.returncode == 0
    assert done.stdout.startswith("the built-in default can be used.\n")


@pytest.mark.parametrize("name", ["check", "serve"])
def test_a_bad_configuration_is_refused_with_all_its_mistakes(name: str, tmp_path: Path) -> None:
    """Case C56: file, key, what is accepted; nothing is started."""
    path = tmp_path / "bad.toml"
    path.write_text('[handoff]\ndeadline_s = 0\nstal_s = 1\n[backend]\nname = "nixxl"\n')
    done = command(name, "--config", str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [str(path), "handoff.deadline_s"],
        [str(path), "handoff.stal_s"],
        [str(path), "backend.name"],
    ]
    assert "did you mean 'stall_s'?" in lines[1]
    assert "Traceback" not in done.stderr


def test_check_has_the_backend_look_at_its_options(tmp_path: Path) -> None:
    """Else each worker would refuse them, and no handoff could move."""
    path = tmp_path / "coordinator.toml"
    path.write_text('[backend]\nname = "loopback"\n[backend.options.loopback]\ncontrl = "x"\n')
    done = command("check", "--config", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{path}: backend.options.loopback: ")
    assert "unknown field `contrl`" in done.stderr
    path.write_text(path.read_text().replace("contrl", "control"))
    done = command("check", "--config", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "options" not in done.stdout


def test_check_says_which_options_cannot_be_looked_at_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is fine, perhaps; the host that runs the workers has the backend."""

    def load(name: str) -> type[Backend]:
        message = f"{name} is not installed"
        raise BackendUnavailableError(message)

    monkeypatch.setattr(registry, "load", load)
    path = tmp_path / "coordinator.toml"
    path.write_text('[backend]\nname = "loopback"\n[backend.options.loopback]\ncontrl = "x"\n')
    cli.check(path)
    assert capsys.readouterr().out.endswith("\n  options      not checked: loopback is not installed\n")


def test_a_file_that_is_not_there_is_refused() -> None:
    done = command("check", "--config", "/nowhere/x.toml")
    assert done.returncode == 2
    assert done.stderr == "/nowhere/x.toml: cannot be read: No such file or directory\n"


def test_an_unknown_option_is_refused() -> None:
    done = command("serve", "--confg", "x")
    assert done.returncode == 2
    assert "No such option" in words(done.stderr)


def test_check_loads_nothing_that_a_coordinator_does_not_use(tmp_path: Path) -> None:
    code = (
        "import sys; from coordinator import cli\n"
        "sys.argv = ['kv-coordinator', 'check']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.split('.')[0] in {'numpy', 'torch', 'zmq', 'aiohttp'}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_error_of_ours_is_a_sentence_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        message = "the worker does not obey; restart it"
        raise WorkerError(message)

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "kv-coordinator: the worker does not obey; restart it\n"


def test_plan_shows_legs_bytes_and_descriptors() -> None:
    done = command(
        "plan", "--prefill", "Llama-3.1-8B", "--prefill-tp", "2", "--decode-tp", "4", "--tokens", "100"
    )
    assert done.returncode == 0
    text = words(done.stdout)
    assert "100 tokens is 7 pages of 16 tokens, over 4 legs" in text
    # 32 layers, K and V, 16 tokens, 2 heads of 256 bytes; 7 pages.
    assert f"1 3 0-31 6-7 {32 * 2 * 16 * 512 * 7:,}" in text
    assert f"prefill 0 sends {32 * 2 * 16 * 1024 * 7:,} {2 * 32 * 2 * 16 * 7:,}" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--prefill", "DeepSeek-V3", "--decode", "Llama-3.1-8B"), "layers: prefill has 61, decode has 32"),
        (
            ("--prefill", "Qwen3-235B-A22B", "--decode-tp", "6"),
            "kv_heads is 4, must divide by the 6 TP ranks",
        ),
        (("--prefill", "Llama-3"), "there is no layout 'Llama-3'"),
        (("--prefill", "Llama-3.1-8B", "--prefill-pp", "33"), "cannot be cut into 33 pipeline stages"),
    ],
)
def test_plan_refuses_what_cannot_be(arguments: tuple[str, ...], told: str) -> None:
    done = command("plan", *arguments)
    assert done.returncode == 2
    assert told in words(done.stdout + done.stderr)


def serve(programs: Programs, directory: Path, more: str = "") -> Program:
    """Start a coordinator with its sockets in ``directory``."""
    path = directory / "coordinator.toml"
    path.write_text(
        f'[listen]\ncontrol = ["ipc://{directory}/control"]\noutcomes = ["ipc://{directory}/outcomes"]\n'
        f'[http]\naddress = ""\n{more}\n'
    )
    return programs.python("-m", "coordinator", "serve", "--config", str(path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_that_it_is_ready_and_ends_cleanly(
    programs: Programs, short_dir: Path, number: signal.Signals
) -> None:
    program = serve(programs, short_dir)
    program.says("coordinator.ready")
    assert {path.name for path in sockets(short_dir)} >= {"control", "outcomes"}
    program.process.send_signal(number)
    assert program.wait() == 0
    events = [json.loads(line)["event"] for line in program.output().splitlines()]
    assert events[0] == "coordinator.ready"
    assert events[-1] == "coordinator.stopped"
    assert sockets(short_dir) == []


def test_serve_refuses_an_address_that_is_taken(programs: Programs, short_dir: Path) -> None:
    serve(programs, short_dir).says("coordinator.ready")
    second = serve(programs, short_dir)
    assert second.wait() == 2
    assert "listen.control: " in second.output()
    assert "Traceback" not in second.output()
