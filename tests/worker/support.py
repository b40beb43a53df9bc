"""What the tests of the worker share: pools, a decode rank that receives, a place for reports."""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from backends.loopback import LoopbackBackend
from coordinator.layout import Layout
from coordinator.messages import Connected, ConnectPeer, Move
from coordinator.worker.host import WorkerHost
from coordinator.worker.memory import MappedPool
from coordinator.worker.places import RankPool
from coordinator.worker.settings import Budget, new_pool_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from backends.base import Backend
    from coordinator.messages import Command, Report

#: How long a test waits for what must come, before it says that it did not.
PATIENCE_S = 10.0

#: Two planes, 1 KiB pages.
LAYOUT = Layout(layers=1, page_tokens=8, kv_heads=1, head_size=64, dtype="bfloat16")
PAGE_BYTES = LAYOUT.page_bytes(1)
PAGES = 64

_T = TypeVar("_T")


def packed(pages: Sequence[int]) -> bytes:
    """Pages as they travel."""
    return struct.pack(f"<{len(pages)}i", *pages)


class PoolFile:
    """A pool in ``/dev/shm``, as a rank allocates it; random content when ``seed`` is given."""

    def __init__(self, pages: int = PAGES, seed: int | None = None) -> None:
        self.pages = pages
        self.path = new_pool_path()
        self.size_bytes = LAYOUT.pool_bytes(pages, 1)
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.truncate(descriptor, self.size_bytes)
        os.close(descriptor)
        self._mapped: MappedPool | None = None
        self.bytes: NDArray[np.uint8] = np.memmap(self.path, np.uint8, "r+")
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.size_bytes, np.uint8)

    @property
    def mapped(self) -> MappedPool:
        """Our own mapping, as a worker's: it locks the file, so no worker process has it then."""
        self._mapped = self._mapped or MappedPool(self.path, self.size_bytes)
        return self._mapped

    @property
    def by_page(self) -> NDArray[np.uint8]:
        """The content as (plane, page, byte)."""
        return self.bytes.reshape(LAYOUT.planes, self.pages, PAGE_BYTES)

    def remove(self) -> None:
        """Remove the file."""
        Path(self.path).unlink(missing_ok=True)


class Receiver:
    """A decode rank's side: a pool, registered with a loopback backend in this process."""

    def __init__(self, peer: str = "decode/0", pages: int = PAGES) -> None:
        self.peer = peer
        self.pool = PoolFile(pages)
        self.backend = LoopbackBackend(peer, {})
        self.backend.start(sends=False)
        self.backend.register(self.pool.mapped.region)

    def connect(self) -> ConnectPeer:
        """The command that leads a worker here."""
        endpoint = self.backend.endpoint()
        return ConnectPeer(self.peer, endpoint, LAYOUT, 1, 0, self.pool.pages)

    def die(self) -> None:
        """Give up the memory, as the kernel does for a process that was killed."""
        self.backend.close()

    def close(self) -> None:
        """Clean up."""
        self.backend.close()
        self.pool.remove()


class Reports:
    """Every report of a host, in order; waits for those that are still to come."""

    def __init__(self) -> None:
        self.all: list[Report] = []
        self._came = threading.Condition()

    def put(self, report: Report) -> None:
        """Take one, from any thread."""
        with self._came:
            self.all.append(report)
            self._came.notify_all()

    def wait(
        self, kind: type[_T], *, count: int = 1, where: Callable[[_T], bool] = lambda _: True
    ) -> list[_T]:
        """Wait for ``count`` reports of a kind; return all of them there are."""
        deadline_s = time.monotonic() + PATIENCE_S
        with self._came:
            while True:
                found = [
                    one for one in cast("list[object]", self.all) if isinstance(one, kind) and where(one)
                ]
                if len(found) >= count:
                    return found
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"{count} x {kind.__name__} did not come within {PATIENCE_S} s: {self.all}"
                self._came.wait(left_s)

    def of(self, move: int) -> list[Report]:
        """Return all reports about one move, without progress."""
        return [report for report in self.all if getattr(report, "move", None) == move]


class Sender:
    """A prefill rank's side: a pool with random content, and a host over a backend."""

    def __init__(
        self,
        options: dict[str, object] | None = None,
        *,
        backend: Backend | None = None,
        budget: Budget | None = None,
        pages: int = PAGES,
    ) -> None:
        self.pool = PoolFile(pages, seed=1)
        self.reports = Reports()
        self.crashed = threading.Event()
        self.may_crash = False
        self.host = WorkerHost(
            backend or LoopbackBackend("worker", options or {}),
            RankPool(LAYOUT, 1, 0, pages),
            budget or Budget(),
            self.reports.put,
            self.crashed.set,
        )
        self.host.start([self.pool.mapped.region])

    def obey(self, *commands: Command) -> None:
        """Hand over commands."""
        self.host.obey(commands)

    def connect(self, receiver: Receiver) -> None:
        """Connect, and wait until that is so."""
        before = len([1 for report in self.reports.all if isinstance(report, Connected)])
        self.obey(receiver.connect())
        self.reports.wait(Connected, count=before + 1)

    def close(self) -> None:
        """Clean up; what hangs stays behind in a daemon thread."""
        self.host.close(0.5)
        self.pool.remove()
        assert self.may_crash or not self.crashed.is_set()


def move(number: int, receiver: Receiver, pages: Sequence[int], to: Sequence[int] | None = None) -> Move:
    """A move of our ``pages`` onto the receiver's, the same ones unless said otherwise."""
    return Move(number, receiver.peer, packed(pages), packed(pages if to is None else to))


def eventually(condition: Callable[[], bool]) -> bool:
    """Poll a condition that nobody signals; whether it became true in time."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def threads_of(peer: str) -> int:
    """How many lanes to a peer there are."""
    return sum(thread.name == f"lane {peer}" for thread in threading.enumerate())


def threads_end(peer: str) -> bool:
    """Wait for the end of all lanes to a peer; whether it came."""
    return eventually(lambda: threads_of(peer) == 0)
