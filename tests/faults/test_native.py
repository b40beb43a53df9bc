"""The native engines under a real coordinator, with real ranks."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from coordinator.messages import Role
from scripts.benches.support.process_cost import cpu_s
from tests.faults.native.rank import End
from tests.faults.native.world import BACKENDS, PATIENCE_S, ends, hand_over, running, say
from tests.support.waiting import eventually


def rests(pid: int) -> bool:
    """Whether a process hardly wakes up, and takes next to no CPU time, over a while.

    22 wake-ups a second and 0.8 % of a core were measured for a worker that waits for a stopped peer, on a
    busy host. One that polls as long as it can wakes up thousands of times.
    """
    before, before_s, began_s = wakes(pid), cpu_s(pid), time.monotonic()
    time.sleep(2.0)  # the time that passes is what is looked at
    passed_s = time.monotonic() - began_s
    return wakes(pid) - before < 100 * passed_s and cpu_s(pid) - before_s < 0.05 * passed_s


def wakes(pid: int) -> int:
    """How often the threads of a process have slept so far, all together."""
    threads = Path(f"/proc/{pid}/task").glob("*/status")
    return sum(
        int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        for text in map(Path.read_text, threads)
    )


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


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_in_flight_of_which_nothing_moves_cost_next_to_nothing(
    backend: str, *, connected: bool
) -> None:
    """Case C50: decode is stopped, so some stand in the engine and all others wait behind them.

    Or all of them wait for the link to it.
    """
    rooms = range(1, 1001)
    with running(backend, {"handoff": {"stall_s": 60.0}}, lost_s=60, connect_s=60) as world:
        decode = world.start(Role.DECODE, "decode")
        say(decode, *rooms, pages=8)
        if connected:
            prefill = world.start(Role.PREFILL, "prefill")
            eventually(lambda: world.logged("peer.connected"), PATIENCE_S)
            decode.child.stop()
        else:
            decode.child.stop()
            prefill = world.start(Role.PREFILL, "prefill")
        say(prefill, *rooms, pages=8)
        world.await_moving(*rooms)
        # A lane comes to rest by and by: its sleeps are a share of the time in which nothing happened.
        for pid in (world.coordinator_pid, world.worker_of(prefill).pid):
            eventually(partial(rests, pid), PATIENCE_S, "it is at rest")
        assert not {line["room"] for line in world.logged("handoff.outcome")} & set(rooms)
        assert bool(world.logged("peer.connected")) == connected
