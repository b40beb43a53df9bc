"""A receiving side that was closed: when nothing lands any more, and that this is not said before."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backends.base import ConnectError, Region
from backends.file_locks import holder
from backends.gate import _entered_byte
from backends.nixl_link import NixlLink
from backends.registry import load
from tests.backends.memory import SharedMemory
from tests.backends.rigs import ROOT, needs_mooncake, needs_nixl
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import Backend
    from backends.gate import Gate
    from backends.nixl_link import Due

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
def test_a_probe_that_comes_late_lands_in_nobodys_memory(
    name: str, options: dict[str, Any], memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender is slow to connect, and its peer has closed, and is silent, when its probe is written."""
    peer, us = receiver(name, options, memory), load(name)("us", options)
    ours = SharedMemory(SIZE)
    us.start(sends=True)
    us.register(ours.region)
    endpoint = peer.endpoint()
    scrap: Any = vars(peer)["_scrap_memory"]
    before = bytes(scrap)
    probe = NixlLink.probe

    def late(link: NixlLink, scrap: Region, remote: Region, block: int, due: Due) -> None:
        peer.close()
        assert peer.silent()
        probe(link, scrap, remote, block, due)

    monkeypatch.setattr(NixlLink, "probe", late)
    with pytest.raises(ConnectError, match="is gone: it has shut its memory"):
        us.connect("peer", endpoint)
    assert bytes(scrap) == before
    us.close()
    ours.remove()


@pytest.mark.parametrize(("name", "options"), ENGINES[2:3])
def test_what_a_probe_is_written_to_is_never_given_back(
    name: str, options: dict[str, Any], memory: SharedMemory
) -> None:
    """A sender that does not find the gate cannot see that it was shut."""
    peer = receiver(name, options, memory)
    peer.endpoint()
    scrap = weakref.ref(vars(peer)["_scrap_memory"])
    gone = weakref.ref(peer)
    peer.close()
    del peer
    gc.collect()
    assert gone() is None
    assert scrap() is not None


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
