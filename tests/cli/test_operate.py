"""The commands of operators, against a coordinator that runs."""

from __future__ import annotations

import gc
import io
import json
import re
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from coordinator import cli
from tests.service.test_process import Rank
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.processes import Program, Programs

TOKEN = "t" * 32


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def command(*arguments: str, **environment: str) -> Done:
    """Run ``kv-coordinator`` to its end in this process, without a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["kv-coordinator", *arguments])
        for name, value in {"COLUMNS": "160", **environment}.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


class Running:
    """A coordinator in a process of its own, with a decode rank that has offered room 1."""

    def __init__(self, programs: Programs, directory: Path, more: str = "") -> None:
        self.file = directory / "coordinator.toml"
        self.file.write_text(
            f'[listen]\ncontrol = ["ipc://{directory}/control"]\noutcomes = ["ipc://{directory}/outcomes"]\n'
            "[rank]\nlost_after_s = 600.0\n[shutdown]\ngrace_s = 0.1\n"
            f'[http]\naddress = "127.0.0.1:0"\n{more}'
        )
        self.program: Program = programs.python("-m", "coordinator", "serve", "--config", str(self.file))
        self.program.says("http.ready", 20)
        match = re.search(r'"http.ready","url":"([^"]+)"', self.program.output())
        assert match is not None
        self.url = match[1]
        self.rank = Rank(f"ipc://{directory}/control")
        assert self.rank.join()
        self.rank.offer(1)
        self.program.says("handoff.opened")

    def ask(self, *arguments: str, code: int = 0) -> str:
        """Run a command; returns what it printed to stdout."""
        done = command(arguments[0], "--url", self.url, *arguments[1:])
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    def told(self, *arguments: str, code: int = 0) -> Any:  # noqa: ANN401 - whatever JSON says
        """The same, as JSON."""
        return json.loads(self.ask(*arguments, "--json", code=code))


@pytest.fixture
def running(programs: Programs, short_dir: Path) -> Iterator[Running]:
    """A coordinator with something to show."""
    it = Running(programs, short_dir)
    yield it
    it.rank.close()


def test_status_shows_what_waits(running: Running) -> None:
    text = running.ask("status")
    assert text.startswith("kv-coordinator ")
    assert ": ready" in text
    assert re.search(r"in flight +1 +1 open, 0 waiting, 0 moving", text)
    assert re.search(r"\n *1 +open .*\? -> d +any sign of prefill for this room from any prefill group", text)
    assert "\x1b" not in text, "no colours where there is no terminal"
    answer = running.told("status")
    assert answer["ready"] is True
    assert [handoff["room"] for handoff in answer["handoffs"]] == ["1"]


def test_a_request_is_found_shown_and_freed(running: Running) -> None:
    text = running.ask("show", "1")
    assert text.startswith("room 1, attempt 1, (no prefill yet) -> d: open")
    assert re.search(r"d/0 +offered +1 +\d", text)
    assert running.told("show", "1")["ranks"][0]["said"] == "offered"
    freed = running.ask("cancel", "1", "--why", "ticket 17")
    assert "cancelled_by_operator: ticket 17" in freed
    outcome = running.rank.outcome()
    assert outcome.failure is not None
    assert outcome.failure.message == "ticket 17"
    assert "all pages are released" in running.ask("show", "1")
    again = command("cancel", "--url", running.url, "1")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == "kv-coordinator: room 1 has ended already\n"


def test_a_room_that_nobody_knows_is_said_to_be_unknown(running: Running) -> None:
    done = command("show", "--url", running.url, "5")
    assert (done.returncode, done.stderr) == (1, "kv-coordinator: nothing is known of room 5\n")


def test_drain_and_resume(running: Running) -> None:
    assert running.ask("drain") == "no new handoffs are admitted; 1 are in flight\n"
    status = running.ask("status", code=1)
    assert "NOT READY" in status
    assert "draining: no new handoffs are admitted" in status
    assert running.told("resume") == {"draining": False, "in_flight": 1}
    running.ask("status")


def test_reload_says_what_has_changed(running: Running) -> None:
    assert running.ask("reload") == "changed: nothing\n"
    running.file.write_text(running.file.read_text() + "[handoff]\ndeadline_s = 9.0\n")
    assert running.ask("reload") == "changed: handoff.deadline_s\n"
    running.file.write_text(running.file.read_text() + "[peer]\nconnect_s = 0\n")
    done = command("reload", "--url", running.url)
    assert done.returncode == 1
    assert "peer.connect_s: is 0" in done.stderr


def test_the_last_lines_of_the_log_can_be_chosen(running: Running) -> None:
    (line,) = running.ask("logs", "--room", "1", "--json").splitlines()
    assert json.loads(line)["event"] == "handoff.opened"
    text = running.ask("logs", "--count", "3")
    assert len(text.splitlines()) == 3
    assert "handoff.opened group=None decode=d room=1" in text
    assert running.ask("logs", "--level", "error") == ""


def test_json_has_nothing_that_a_terminal_obeys_either(running: Running) -> None:
    evil = "\x7f\x9b2J\x1b[2J\u202e"
    running.ask("cancel", "1", "--why", evil)
    for arguments in (("logs", "--room", "1"), ("show", "1"), ("status",)):
        text = running.ask(*arguments, "--json")
        assert text.replace("\n", "").isprintable()
    lines = running.ask("logs", "--room", "1", "--json").splitlines()
    assert evil in [json.loads(line).get("why") for line in lines]
    assert running.told("show", "1")["handoff"]["failure"]["message"] == evil


def test_the_log_is_followed_and_the_end_is_told(running: Running, programs: Programs) -> None:
    follower = programs.python("-m", "coordinator", "logs", "--url", running.url, "-f", "-n", "9", "--json")
    follower.says("handoff.opened", 20)
    command("drain", "--url", running.url)
    follower.says("operator.drain")
    running.rank.close()
    running.program.process.terminate()
    assert running.program.wait(20) == 0
    assert follower.wait(20) in {0, 3}


def test_top_looks_again_and_again(running: Running, programs: Programs) -> None:
    top = programs.python("-m", "coordinator", "top", "--url", running.url, "--interval", "0.1")
    eventually(lambda: top.output().count("in flight") > 2, 20)


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("show", "1"), ("top",), ("cancel", "1"), ("drain",), ("resume",), ("logs",), ("reload",)],
)
def test_where_no_coordinator_answers_it_says_so(arguments: tuple[str, ...]) -> None:
    # Port 9 is nobody's on this host.
    done = command(arguments[0], "--url", "http://127.0.0.1:9", *arguments[1:])
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "kv-coordinator: no coordinator answers at http://127.0.0.1:9: nobody listens there; "
        "is it running, and is this its http.address?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        (("status",), b"hello"),
        (("show", "1"), b""),
        (("status",), b"\xff"),
        (("drain",), b"[" * 100_000),
        (("logs",), b"\xff\n"),
        (("status",), b"{}"),
        (("status",), b"[]"),
        (("show", "1"), b"{}"),
        (("show", "1"), b'{"room": 7, "attempt": null}'),
        (("cancel", "1"), b"[1]"),
        (("drain",), b'{"draining": true}'),
        (("resume",), b"7"),
        (("reload",), b'{"changed": 5}'),
        (("top",), b'"top"'),
        (("logs",), b"[]\n"),
        (("logs", "--follow"), b"data: text\n"),
    ],
)
def test_what_answers_with_something_else_is_no_coordinator(arguments: tuple[str, ...], body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        """Answers everything in its own way."""

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            done = command(*arguments, "--url", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    # A connection that was left open says so when it is collected.
    gc.collect()
    assert (done.returncode, done.stdout) == (3, "")
    assert "what is there answers with something else" in done.stderr


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "off.toml"
    file.write_text('[http]\naddress = ""\n')
    done = command("status", "--config", str(file))
    assert done.returncode == 2
    assert done.stderr == "http.address is empty: this coordinator serves no operators\n"
    done = command("status", "--url", "ftp://x")
    assert done.returncode == 2
    assert "is no URL of a coordinator" in done.stderr
    done = command("status", "--token-file", "/nowhere")
    assert done.returncode == 2
    assert "the token's file /nowhere cannot be read" in done.stderr


@pytest.mark.parametrize("url", ["http://[::1", "http://a..b:1", f"http://{'a' * 70}:1", "http://\u2100:1"])
def test_a_url_that_can_be_none_is_refused_in_a_sentence(url: str) -> None:
    done = command("status", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (f"{url!r} is no URL of a coordinator, which looks like http://127.0.0.1:7780\n")


def test_a_token_that_cannot_be_sent_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\ntwo\n")
    done = command("status", "--url", "http://127.0.0.1:9", "--token-file", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert "the token has characters that cannot be sent" in done.stderr


def test_the_address_and_the_token_come_from_the_configuration(
    programs: Programs, short_dir: Path, tmp_path: Path
) -> None:
    token = short_dir / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    running = Running(programs, short_dir, f'token_file = "{token}"\n')
    try:
        done = command("drain", "--url", running.url)
        assert done.returncode == 1
        assert "needs the token" in done.stderr
        ours = tmp_path / "mine.toml"
        address = running.url.removeprefix("http://")
        ours.write_text(f'[http]\naddress = "{address}"\ntoken_file = "{token}"\n')
        assert command("drain", "--config", str(ours)).returncode == 0
        done = command("resume", KV_COORDINATOR_URL=running.url, KV_COORDINATOR_TOKEN_FILE=str(token))
        assert done.returncode == 0, done.stderr
    finally:
        running.rank.close()
