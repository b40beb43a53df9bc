"""What a service manager is told, and the signal that has the configuration read again."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from coordinator import heart
from coordinator.commands.caller import Caller
from coordinator.config import Config
from coordinator.errors import CallRefusedError
from coordinator.metrics import LAG_BOUNDS_S, Histogram
from coordinator.process import _unhandled
from coordinator.service import Service
from coordinator.systemd import Notifier
from tests.service.test_process import Rank
from tests.support.logs import capture
from tests.support.waiting import eventually, eventually_async

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.processes import Program, Programs


@pytest.fixture
def manager(short_dir: Path) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"{short_dir}/notify")
        receiver.settimeout(20)
        yield receiver


def events(program: Program) -> list[dict[str, Any]]:
    return [json.loads(line) for line in program.output().splitlines() if line.startswith("{")]


def start(
    programs: Programs, directory: Path, text: str = "", address: str = "", **environment: str
) -> tuple[Program, Path]:
    file = directory / "coordinator.toml"
    sockets = f'[listen]\ncontrol = ["ipc://{directory}/c"]\noutcomes = ["ipc://{directory}/o"]\n'
    file.write_text(f'{sockets}[http]\naddress = "{address}"\n{text}')
    program = programs.python("-m", "coordinator", "serve", "--config", str(file), environment=environment)
    program.says("coordinator.ready", 20)
    return program, file


def test_the_manager_hears_ready_then_alive_then_stopping(
    programs: Programs, short_dir: Path, manager: socket.socket
) -> None:
    program, _ = start(programs, short_dir, NOTIFY_SOCKET=f"{short_dir}/notify", WATCHDOG_USEC="600000")
    assert manager.recv(100) == b"READY=1"
    for _ in range(3):
        assert manager.recv(100) == b"WATCHDOG=1"
    program.process.terminate()
    told = [b"WATCHDOG=1"]
    while told[-1] == b"WATCHDOG=1":
        told.append(manager.recv(100))
    assert told[-1] == b"STOPPING=1"
    assert program.wait() == 0


def hears_out(manager: socket.socket) -> int:
    """How often something is still said before there is silence."""
    for heard in range(5):
        try:
            manager.recv(100)
        except TimeoutError:
            return heard
    return 5


def test_a_process_that_stands_still_does_not_say_that_it_is_alive(
    programs: Programs, short_dir: Path, manager: socket.socket
) -> None:
    program, _ = start(programs, short_dir, NOTIFY_SOCKET=f"{short_dir}/notify", WATCHDOG_USEC="400000")
    assert manager.recv(100) == b"READY=1"
    assert manager.recv(100) == b"WATCHDOG=1"
    program.process.send_signal(signal.SIGSTOP)
    manager.settimeout(1.0)
    assert hears_out(manager) < 5
    program.process.send_signal(signal.SIGCONT)


def test_a_manager_in_the_abstract_namespace_is_found(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    name = f"kv-{short_dir.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        receiver.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        monkeypatch.setenv("WATCHDOG_PID", "1")
        notifier = Notifier()
        notifier.alive()  # the watchdog is another process's
        notifier.ready()
        assert receiver.recv(100) == b"READY=1"


def test_without_a_manager_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notifier = Notifier()
    notifier.ready()
    notifier.alive()
    notifier.stopping()


def test_sighup_has_the_configuration_read_again(programs: Programs, short_dir: Path) -> None:
    program, file = start(programs, short_dir, '[log]\nformat = "json"\n')
    file.write_text(file.read_text() + "[handoff]\ndeadline_s = 7.0\n")
    program.process.send_signal(signal.SIGHUP)
    program.says("config.reloaded")
    (line,) = [entry for entry in events(program) if entry["event"] == "config.reloaded"]
    assert line["changed"] == ["handoff.deadline_s"]
    file.write_text(file.read_text().replace("7.0", "-7.0"))
    program.process.send_signal(signal.SIGHUP)
    program.says("config.refused")
    eventually(lambda: program.process.poll() is None)
    program.process.terminate()
    assert program.wait() == 0


def test_a_coordinator_that_is_about_to_end_says_so_until_it_ends(
    programs: Programs, short_dir: Path
) -> None:
    """Case C53."""
    program, _ = start(programs, short_dir, "[shutdown]\ngrace_s = 600.0\n", address="127.0.0.1:0")
    program.says("http.ready")
    (url,) = [entry["url"] for entry in events(program) if entry["event"] == "http.ready"]
    rank = Rank(f"ipc://{short_dir}/c")
    try:
        assert rank.join()
        rank.offer(1)
        program.says("handoff.opened")
        program.process.terminate()
        program.says("coordinator.draining")
        caller = Caller(url)
        with pytest.raises(CallRefusedError, match="draining: no new handoffs are admitted"):
            caller.get("/readyz")
        with pytest.raises(CallRefusedError, match="about to end"):
            caller.post("/v1/resume")
        assert caller.get("/healthz")["ok"]
        assert caller.get("/v1/status")["in_flight"]["open"] == 1
        program.process.terminate()
        assert program.wait() == 0
    finally:
        rank.close()


async def test_what_a_callback_raises_is_counted_and_told() -> None:
    service = Service(Config())
    error = OSError("out of luck")
    with capture("error") as log:
        _unhandled(service, {"message": "Exception in callback", "exception": error})
    await service.stop()
    assert service.counters.bugs == 1
    (line,) = log.of("coordinator.unhandled")
    assert line["exc_info"] is error


async def test_the_loops_lag_is_measured() -> None:
    lag_s = Histogram(LAG_BOUNDS_S)
    looks = 0

    def alive() -> None:
        nonlocal looks
        looks += 1

    beating = asyncio.get_running_loop().create_task(heart.beat(lag_s, alive))
    await eventually_async(lambda: looks >= 2)
    beating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beating
    assert lag_s.count == looks
    assert 0 <= lag_s.sum_s < 10
