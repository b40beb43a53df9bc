"""A receiving side that was closed: when nothing lands any more, and that this is not said before."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backends.file_locks import holder
from backends.gate import _entered_byte
from backends.registry import load
from tests.backends.memory import SharedMemory
from tests.backends.rigs import ROOT, needs_mooncake, needs_nixl
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import Backend
    from backends.gate import Gate

SIZE = 16 << 20
ENGINES = [
    pytest.param("loopback", {}, id="loopback"),
    pytest.param("nixl", {"transports": "tcp", "devices": "lo"}, marks=needs_nixl, id="nixl over tcp"),
    # Whatever UCX chooses on one host: there the sender copies by itself.
    pytest.param("nixl", {}, marks=needs_nixl, id="nixl on one host"),
    pytest.param("mooncake", {}, marks=needs_mooncake, id="mooncake"),
]


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory(SIZE)
    yield made
    Path(made.path).unlink(missing_ok=True)


@pytest.fixture
def hammer(memory: SharedMemory) -> Iterator[Callable[..., tuple[Backend, subprocess.Popen[bytes]]]]:
    """Start a receiving side here, and a process that writes into it on and on."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        name: str, options: dict[str, Any], *, hide: bool = False
    ) -> tuple[Backend, subprocess.Popen[bytes]]:
        backend = receiver(name, options, memory)
        if hide:
            memory.remove()
        command = (sys.executable, "-m", "tests.backends.hammer_program", name, json.dumps(options))
        arguments = (str(SIZE), backend.endpoint().hex())
        process = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE)
        started.append(process)
        assert said(process) == "first"
        return backend, process

    yield start
    for process in started:
        process.send_signal(signal.SIGCONT)
        if process.poll() is None:
            process.kill()
        process.communicate()


def receiver(name: str, options: dict[str, Any], memory: SharedMemory) -> Backend:
    backend = load(name)("receiver", options)
    backend.start(sends=False)
    backend.register(memory.region)
    return backend


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


@pytest.mark.parametrize(("name", "options"), ENGINES)
def test_once_it_is_silent_nothing_lands(
    name: str, options: dict[str, Any], memory: SharedMemory, hammer: Callable[..., Any]
) -> None:
    """Case C16: the sender lives, and does not know; the memory has a new agent already."""
    backend, process = hammer(name, options)
    assert not backend.silent()
    backend.close()
    renewed = receiver(name, options, memory)
    eventually(backend.silent, 20, "silence")
    memory.bytes[:] = 0
    assert said(process).startswith("lost")
    assert said(process).startswith("gone"), "the endpoint of the former agent leads nowhere"
    assert process.wait(20) == 0
    assert not memory.bytes.any()
    assert backend.silent(), "once is for ever"
    renewed.close()


@pytest.mark.parametrize(("name", "options"), ENGINES[2:3])
def test_a_writer_that_was_stopped_is_waited_for(
    name: str, options: dict[str, Any], hammer: Callable[..., Any]
) -> None:
    """What it had begun may go on when it does; its end settles it."""
    backend, process = hammer(name, options)
    status = Path(f"/proc/{process.pid}/status")

    def stopped_inside() -> bool:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: "State:\tT" in status.read_text(), what="it is stopped")
        return not is_empty(backend._gate)

    eventually(stopped_inside, 20, "the writer is stopped inside the gate")
    backend.close()
    assert not backend.silent()
    process.kill()
    process.wait(20)
    eventually(backend.silent, 20, "silence")


@pytest.mark.parametrize(("name", "options"), ENGINES[2:3])
def test_a_writer_that_does_not_find_the_gate_is_never_known_to_rest(
    name: str, options: dict[str, Any], hammer: Callable[..., Any]
) -> None:
    """As from a container with a ``/dev/shm`` of its own, and our PID namespace."""
    backend, process = hammer(name, options, hide=True)
    backend.close()
    process.kill()
    process.wait(20)
    assert not backend.silent()


def is_empty(gate: Gate) -> bool:
    """Look without disturbing anybody."""
    return holder(gate._descriptor, _entered_byte(gate.number)) is None
