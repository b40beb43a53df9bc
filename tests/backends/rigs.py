"""What the contract suite needs to know about a backend, beyond the contract.

To run the suite on a backend of your own, installed with an entry point in ``kv_coordinator.backends``::

    pytest tests/backends/test_contract.py --backend NAME [--backend-options '{"key": 1}']

It is driven as ``Rig`` does: a peer that is stopped by a signal must make a large write hang. Where it
does not (because the backend copies by itself), tests that need one are skipped and say so.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import Grid, Part, Status
from backends.registry import load
from tests.backends.memory import SharedMemory
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Backend, Link, Transfer

ROOT = Path(__file__).parents[2]
#: Block size and number of the plain grid that most tests use.
BLOCK_BYTES = 4096
#: More than all socket buffers on a way hold.
LARGE_BYTES = 40 << 20
#: How long a test waits for what must come.
PATIENCE_S = 20.0
#: How much later than its bound something may come, on a busy host.
SLACK_S = 8.0


HAS_MOONCAKE = find_spec("mooncake") is not None
#: Marks of a test that needs mooncake.
needs_mooncake = (
    pytest.mark.mooncake,
    pytest.mark.skipif(not HAS_MOONCAKE, reason="the mooncake wheel is not installed"),
)
HAS_NIXL = any(find_spec(package) for package in ("nixl_cu12", "nixl_cu13", "nixl"))
#: Marks of a test that needs nixl.
needs_nixl = (pytest.mark.nixl, pytest.mark.skipif(not HAS_NIXL, reason="the nixl wheel is not installed"))


class Peer:
    """A receiving process, with memory that the test sees too.

    Attributes:
        memory: its regions, in order; filled with zeros.
        endpoint: what it handed out.

    """

    def __init__(self, rig: Rig, *sizes_bytes: int, launcher: Sequence[str] = ()) -> None:
        """Start it and wait for its endpoint; ``launcher`` is put before its command."""
        self.memory = [SharedMemory(size_bytes) for size_bytes in sizes_bytes]
        files = [f"{memory.path}:{memory.bytes.size}" for memory in self.memory]
        command = [
            *launcher,
            sys.executable,
            "-m",
            "tests.backends.peer_program",
            rig.name,
            json.dumps(rig.options),
            *files,
        ]
        self._closed = False
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            pytest.fail(f"the peer ended with {self.process.returncode} before it gave its endpoint")
        self.endpoint = bytes.fromhex(line.decode())

    def stop(self) -> None:
        """Stop it in its tracks (SIGSTOP), and wait until it has."""
        self.process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self.process.pid}/status")
        eventually(lambda: "State:\tT" in status.read_text(), what="the peer is stopped")

    def go_on(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it (SIGKILL), and wait for its end."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> int:
        """End it in good order and remove its memory, once; returns its exit code."""
        if self._closed:
            return self.process.returncode
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
        try:
            self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
            for memory in self.memory:
                memory.remove()
        return self.process.returncode


@dataclass
class Rig:
    """How the suite drives one backend."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def backend(self, agent: str = "us") -> Backend:
        """Make a backend that is not started yet."""
        return load(self.name)(agent, self.options)

    def hold_up(self, peer: Peer) -> None:
        """See to it that a large write to ``peer`` does not finish."""
        peer.stop()

    def let_go(self, peer: Peer) -> None:
        """Undo ``hold_up``."""
        peer.go_on()


@dataclass
class LoopbackRig(Rig):
    """Loopback copies by itself, so its own faults must hold it up."""

    control: Path = Path()

    def hold_up(self, peer: Peer) -> None:
        """Stall every write after 1 MiB."""
        del peer
        write_control(self.control, '[[faults]]\nkind = "stall"\nafter_bytes = 1048576\n')

    def let_go(self, peer: Peer) -> None:
        """Stall no more."""
        del peer
        write_control(self.control, "")


def write_control(path: Path, text: str) -> None:
    """Replace a control file of the loopback backend atomically."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.rename(path)


def make_rig(name: str, options: dict[str, Any], directory: Path) -> Rig:
    """Return the rig of a backend."""
    if name == "loopback":
        control = directory / "faults.toml"
        return LoopbackRig(name, {"control": str(control), **options}, control)
    if name == "nixl":
        # A way through sockets: on one host a write is a copy, which a stopped peer does not hold up.
        return Rig(name, {"transports": "tcp", "devices": "lo", **options})
    if name == "nixl-threads":
        return make_rig("nixl", {"threads_per_peer": 2, **options}, directory)
    return Rig(name, options)


def plain_grid(size_bytes: int, region: int = 0) -> Grid:
    """Cover a region with blocks of ``BLOCK_BYTES``."""
    return Grid(region, 0, BLOCK_BYTES, BLOCK_BYTES, size_bytes // BLOCK_BYTES)


def whole(size_bytes: int) -> Part:
    """Copy all of region 0 onto region 0."""
    grid = plain_grid(size_bytes)
    blocks = np.arange(grid.count, dtype=np.int32)
    return Part(grid, blocks, grid, blocks)


def until_terminal(transfer: Transfer, timeout_s: float = PATIENCE_S) -> Status:
    """Poll a transfer until it is no longer moving."""
    eventually(lambda: transfer.poll() is not Status.MOVING, timeout_s, "the transfer ends")
    return transfer.status


def until_done(transfer: Transfer) -> None:
    """Poll a transfer until it is done, which it must be."""
    assert until_terminal(transfer) is Status.DONE, transfer.error
    assert transfer.settled


@contextlib.contextmanager
def held_up(rig: Rig, peer: Peer, link: Link) -> Iterator[Transfer]:
    """Post a write of all of region 0 that hangs in the middle; skip the test where none does."""
    rig.hold_up(peer)
    try:
        transfer = link.write([whole(peer.memory[0].bytes.size)])
        for _ in range(100):
            transfer.poll()
        if transfer.status is Status.DONE:
            pytest.skip(f"{rig.name} finishes a write to a stopped peer")
        yield transfer
    finally:
        rig.let_go(peer)
