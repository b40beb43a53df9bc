"""The native engines under a real coordinator, with real ranks: the same fault has the same verdict."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest

from coordinator.client import Layout
from coordinator.messages import Role
from scripts.benches.support.deployment import Deployment
from scripts.benches.support.process_cost import cpu_s
from tests.backends.rigs import needs_mooncake, needs_nixl
from tests.faults.native.rank import Await, End, Say
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def __init__(self, deployment: Deployment) -> None:
        """Start with no rank."""
        self._deployment = deployment
        self._paths: dict[RankHandle, str] = {}

    def start(self, role: Role, group: str) -> RankHandle:
        """Start a rank that is a whole engine; it is ready, and so is its worker if it has one."""
        (rank,) = self._deployment.start(role, group, 1, pages=ALL_PAGES, layout=LAYOUT)
        self._deployment.wait_ready()
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

    @property
    def coordinator_pid(self) -> int:
        """The coordinator's process."""
        return self._deployment.coordinator.pid

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
    with Deployment(
        "tests.faults.native.rank", tables, backend=backend, options=options(backend, lost_s, connect_s)
    ) as deployment:
        yield World(deployment)


def say(rank: RankHandle, *rooms: int, pages: int = ALL_PAGES) -> None:
    """Have the rank send or offer pages; the coordinator has heard it when this returns."""
    rank.tell(Say(list(rooms), pages))
    assert rank.hear(PATIENCE_S) == "said"


def ends(rank: RankHandle, *rooms: int) -> list[End]:
    """Wait for the outcomes of these rooms at a rank."""
    rank.tell(Await(list(rooms)))
    return [End(*end) for end in rank.hear(PATIENCE_S)]


def hand_over(prefill: RankHandle, decode: RankHandle, room: int) -> str:
    """Hand over a room; the reason that both sides hear."""
    say(decode, room)
    say(prefill, room)
    (end,), (other,) = ends(prefill, room), ends(decode, room)
    assert end == other
    return end.reason


def rests(pid: int) -> bool:
    """Whether a process hardly wakes up, and takes next to no CPU time, over a while.

    The bounds tell rest from work, on a busy host too, where a wake-up costs several times more: 0.6 to
    1.1 % of a core were measured on one. What it is on a quiet one, ``scripts/bench idle`` says.
    """
    before, before_s, began_s = wakes(pid), cpu_s(pid), time.monotonic()
    time.sleep(2.0)  # the time that passes is what is looked at
    passed_s = time.monotonic() - began_s
    return wakes(pid) - before < 1000 * passed_s and cpu_s(pid) - before_s < 0.2 * passed_s


def wakes(pid: int) -> int:
    """How often the threads of a process have slept so far, all together."""
    threads = Path(f"/proc/{pid}/task").glob("*/status")
    return sum(
        int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        for text in map(Path.read_text, threads)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_fault_has_the_same_reason(backend: str) -> None:
    """Cases C07, C10, C11: and the peer is served again as soon as it can be."""
    with running(backend, {}, lost_s=2, connect_s=2) as world:
        prefill, decode = world.start(Role.PREFILL, "prefill"), world.start(Role.DECODE, "decode")
        assert hand_over(prefill, decode, 1) == "succeeded"
        worker = world.worker_of(prefill)
        reasons = {}

        say(decode, 2)
        decode.child.stop()
        say(prefill, 2)
        (end,) = ends(prefill, 2)
        reasons["decode stopped, in the middle"] = end.reason
        decode.child.cont()
        assert hand_over(prefill, decode, 3) == "succeeded"
        # Over a new link: the old one was given up.
        eventually(lambda: len(world.logged("peer.connected")) == 2, PATIENCE_S)

        say(decode, 4)
        decode.child.stop()
        say(prefill, 4)
        decode.kill()
        (end,) = ends(prefill, 4)
        reasons["decode dead, in the middle"] = end.reason
        decode = world.start(Role.DECODE, "decode")
        assert hand_over(prefill, decode, 5) == "succeeded"
        assert worker.is_running()
        assert len(world.logged("worker.up")) == 1

        say(decode, 6)
        decode.child.stop()
        other = world.start(Role.PREFILL, "other")
        say(other, 6)
        (end,) = ends(other, 6)
        reasons["decode stopped, at the first contact"] = end.reason
        decode.child.cont()

    assert reasons == {
        "decode stopped, in the middle": "transport",
        "decode dead, in the middle": "peer_lost",
        "decode stopped, at the first contact": "connect",
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_that_crashes_costs_its_own_worker_alone(backend: str) -> None:
    """Case C08: SIGSEGV in the middle of a transfer, while another engine's worker is in one, too."""
    with running(backend, {}, lost_s=60, connect_s=10) as world:
        one, two = world.start(Role.PREFILL, "one"), world.start(Role.PREFILL, "two")
        decode = world.start(Role.DECODE, "decode")
        doomed, other = world.worker_of(one), world.worker_of(two)
        say(decode, 1, 2)
        decode.child.stop()
        say(one, 1)
        say(two, 2)

        os.kill(doomed.pid, signal.SIGSEGV)

        (end,) = ends(one, 1)
        assert end == End("transport", "the worker of one/0 died: killed by signal 11")
        decode.child.cont()
        assert ends(two, 2) == [End("succeeded", "")]
        assert other.is_running()
        assert world.worker_of(two).pid == other.pid
        # And the worker comes back.
        assert hand_over(one, decode, 3) == "succeeded"
        assert world.worker_of(one).pid != doomed.pid


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_handoffs_at_once_to_a_new_peer_connect_once(backend: str) -> None:
    """Case C09."""
    rooms = range(1, 51)
    with running(backend, {}, lost_s=60, connect_s=10) as world:
        prefill = world.start(Role.PREFILL, "prefill")
        say(prefill, *rooms, pages=1)
        decode = world.start(Role.DECODE, "decode")
        say(decode, *rooms, pages=1)
        assert {end.reason for end in ends(prefill, *rooms)} == {"succeeded"}
        assert len(world.logged("peer.connected")) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slow_first_contact_has_a_budget_of_its_own(backend: str) -> None:
    """Case C26: it takes longer than a moving transfer may stand still, and costs the handoff nothing."""
    with running(backend, {"handoff": {"stall_s": 1.0}}, lost_s=60, connect_s=30) as world:
        decode = world.start(Role.DECODE, "decode")
        say(decode, 1, pages=1)
        decode.child.stop()
        prefill = world.start(Role.PREFILL, "prefill")
        say(prefill, 1, pages=1)
        time.sleep(2.0)  # the time that passes is what this test is about
        assert not world.logged("peer.connected")
        decode.child.cont()
        assert ends(prefill, 1) == [End("succeeded", "")]
        (connected,) = eventually(lambda: world.logged("peer.connected"), PATIENCE_S)
        assert connected["seconds"] > 2.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_in_flight_of_which_nothing_moves_cost_next_to_nothing(backend: str) -> None:
    """Case C50: decode is stopped, so some stand in the engine and all others wait behind them."""
    rooms = range(1, 1001)
    with running(backend, {"handoff": {"stall_s": 60.0}}, lost_s=60, connect_s=10) as world:
        prefill, decode = world.start(Role.PREFILL, "prefill"), world.start(Role.DECODE, "decode")
        say(decode, *rooms, pages=8)
        decode.child.stop()
        say(prefill, *rooms, pages=8)
        eventually(lambda: len(world.logged("handoff.moving")) == 1000, PATIENCE_S, "all are in flight")
        # A lane comes to rest by and by: its sleeps are a share of the time in which nothing happened.
        for pid in (world.coordinator_pid, world.worker_of(prefill).pid):
            eventually(partial(rests, pid), PATIENCE_S, "it is at rest")
        assert not {line["room"] for line in world.logged("handoff.outcome")} & set(rooms)
