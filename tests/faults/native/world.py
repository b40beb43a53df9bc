"""A real coordinator with ranks over a native engine, as a test of faults drives them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest

from coordinator.client import Layout
from scripts.benches.support.deployment import Deployment
from tests.backends.rigs import needs_mooncake, needs_nixl
from tests.faults.native.rank import Await, Cancel, End, Pose, Say
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.messages import Role
    from scripts.benches.support.deployment import RankHandle, Tables

BACKENDS: Final = [pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)]
#: A page has 1 MiB over its planes; all pages are more than the buffers of a connection take.
LAYOUT: Final = Layout(layers=32, page_tokens=16, kv_heads=4, head_size=128, dtype="bfloat16")
ALL_PAGES: Final = 64
PATIENCE_S: Final = 30.0
#: Ranks are stopped here: their silence must not be what ends the handoffs.
SILENCE_IS_FINE: Final[Tables] = {"rank": {"lost_after_s": 600.0}}


def options(backend: str, lost_s: float, connect_s: float) -> dict[str, Any]:
    """After which time a peer is lost, and how long a connect may take."""
    if backend == "nixl":
        lost = {"tcp_user_timeout_s": lost_s, "connect_timeout_s": connect_s}
        return {"transports": "tcp", "devices": "lo", **lost}
    return {"peer_timeout_s": lost_s, "connect_timeout_s": connect_s}


class World:
    """A coordinator and native ranks."""

    def __init__(self, deployment: Deployment, backend: str, options: dict[str, Any]) -> None:
        """Start with no rank."""
        self._deployment = deployment
        self._backend = backend
        self._options = options
        self._paths: dict[RankHandle, str] = {}

    def start(self, role: Role, group: str, *, works: bool = True) -> RankHandle:
        """Start a rank that is a whole engine; it is ready, and so is its worker if it has one that works."""
        (rank,) = self._deployment.start(role, group, 1, pages=ALL_PAGES, layout=LAYOUT)
        self._deployment.wait_ready(workers=works)
        self._paths[rank] = rank.hear(PATIENCE_S)
        return rank

    def worker_of(self, prefill: RankHandle) -> psutil.Process:
        """The process that sends for a rank: beside the rank, the one that has its memory."""

        def found() -> psutil.Process | None:
            for process in psutil.Process(self._deployment.coordinator.pid).children(recursive=True):
                try:
                    if self._paths[prefill] in Path(f"/proc/{process.pid}/maps").read_text():
                        return process
                except OSError:
                    continue
            return None

        process = eventually(found, PATIENCE_S, f"the worker of {prefill.name}")
        assert process is not None
        return process

    def pose(self, decode: RankHandle, group: str, how: str) -> None:
        """Have a decode rank's process be the rank of another group from now on, one that is crooked."""
        control = self._deployment.coordinator.control
        decode.tell(Pose(control, group, self._backend, self._options, how))
        assert decode.hear(PATIENCE_S) == "posed"

    @property
    def coordinator_pid(self) -> int:
        """The coordinator's process."""
        return self._deployment.coordinator.pid

    def await_moving(self, *rooms: int) -> None:
        """Wait until all of these rooms are in the hands of a worker."""

        def moving() -> bool:
            return {line["room"] for line in self.logged("handoff.moving")} >= set(rooms)

        eventually(moving, PATIENCE_S, f"{rooms} are moving")

    def logged(self, event: str) -> list[dict[str, Any]]:
        """All lines of the coordinator's log of one kind; it must be alive."""
        self._deployment.check()
        # The last line may be half written.
        lines = self._deployment.coordinator.log_path.read_text().split("\n")[:-1]
        return [line for line in map(json.loads, lines) if line["event"] == event]


@contextmanager
def running(backend: str, tables: Tables, lost_s: float, connect_s: float) -> Iterator[World]:
    """Run a coordinator."""
    tables = {**SILENCE_IS_FINE, **tables}
    settings = options(backend, lost_s, connect_s)
    with Deployment("tests.faults.native.rank", tables, backend=backend, options=settings) as deployment:
        yield World(deployment, backend, settings)


def say(rank: RankHandle, *rooms: int, pages: int = ALL_PAGES, last: bool = True) -> None:
    """Have the rank send or offer pages; the coordinator has heard it when this returns."""
    rank.tell(Say(list(rooms), pages, last))
    assert rank.hear(PATIENCE_S) == "said"


def cancel(rank: RankHandle, *rooms: int) -> None:
    """Have the rank give these rooms up; the coordinator has heard it when this returns."""
    rank.tell(Cancel(list(rooms)))
    assert rank.hear(PATIENCE_S) == "said"


def ends(rank: RankHandle, *rooms: int) -> list[End]:
    """Wait for the outcomes of these rooms at a rank."""
    rank.tell(Await(list(rooms)))
    return [End(*end) for end in rank.hear(PATIENCE_S)]


def hand_over(prefill: RankHandle, decode: RankHandle, room: int, pages: int = ALL_PAGES) -> str:
    """Hand over a room; the reason that both sides hear."""
    say(decode, room, pages=pages)
    say(prefill, room, pages=pages)
    (end,), (other,) = ends(prefill, room), ends(decode, room)
    assert end == other
    return end.reason
