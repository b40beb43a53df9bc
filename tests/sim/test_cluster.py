"""Whole deployments under the hands of a test: hurt, observed, and gone without a trace."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from coordinator.messages import Role
from coordinator.sim.cluster import Cluster
from coordinator.sim.errors import SimulationError
from coordinator.sim.options import ClusterOptions, small_layout
from coordinator.sim.wire import Request
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from coordinator.sim.forks import ForkServer

ONE = ClusterOptions(layout=small_layout(1), pages=64)


def test_one_rank_on_each_side_hands_over_and_leaves_no_trace(forks: ForkServer) -> None:
    """Also prompts that decode has already, in part or whole (case C48), and a room used again (case C35)."""
    with Cluster(ONE, forks) as cluster:
        prefill = cluster.add(Role.PREFILL, "prefill-0", 1)
        decode = cluster.add(Role.DECODE, "decode-0", 1)
        cluster.wait_ready()
        pools = [Path(ready.pool_path) for group in (prefill, decode) for ready in group.ready.values()]
        pids = [cluster.coordinator.pid, prefill.children[0].pid, decode.children[0].pid]
        assert all(pool.stat().st_size == 64 * 16 * 1024 for pool in pools)
        requests = [Request(room, pages=4, chunk_pages=2, prefix_pages=room % 5) for room in range(1, 9)]
        for again in range(2):
            requests = [msgspec.structs.replace(request, generation=again) for request in requests]
            cluster.hand_off(requests, prefill, decode)
            cluster.wait_until(lambda: not cluster.book.open, 40, "the handoffs")
        cluster.finish(20)
        assert [handoff.outcome for handoff in cluster.book.settled] == [""] * 16
        assert sum(handoff.corrupt_pages for handoff in cluster.book.settled) == 0
        assert {last.free_pages for lasts in cluster.book.finals.values() for last in lasts.values()} == {64}
    assert not cluster.directory.exists()
    assert not any(pool.exists() for pool in pools)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_process_that_dies_unbidden_is_named_with_its_last_words(forks: ForkServer) -> None:
    with Cluster(ONE, forks) as cluster:
        prefill = cluster.add(Role.PREFILL, "prefill-0", 1)
        cluster.wait_ready()
        os.kill(prefill.children[0].pid, signal.SIGKILL)
        with pytest.raises(SimulationError, match=r"prefill-0 rank 0 \(pid \d+\) was killed by SIGKILL"):
            cluster.wait_until(lambda: False, 10, "nothing")
        # One that was killed through its handle is no error.
        prefill.restart()
        cluster.wait_ready()
        os.kill(cluster.coordinator.pid, signal.SIGKILL)
        with pytest.raises(
            SimulationError, match=r"coordinator \(pid \d+\) was killed[^\0]*coordinator.ready"
        ):
            cluster.wait_until(lambda: False, 10, "nothing")


def test_what_does_not_come_in_time_is_named(forks: ForkServer) -> None:
    with Cluster(ONE, forks) as cluster:
        prefill = cluster.add(Role.PREFILL, "prefill-0", 1)
        with pytest.raises(SimulationError, match="a group prefill-0 already"):
            cluster.add(Role.PREFILL, "prefill-0", 1)
        with pytest.raises(SimulationError, match="before a new one starts"):
            prefill.start()
        cluster.wait_ready()
        prefill.stop(0)
        assert psutil.Process(prefill.children[0].pid).status() == psutil.STATUS_STOPPED
        with pytest.raises(SimulationError, match=r"waited 0\.2 s for the end; because"):
            cluster.wait_until(lambda: False, 0.2, "the end", lambda: "because")
        with pytest.raises(SimulationError, match="has 65 pages, a pool has 64"):
            cluster.hand_off([Request(1, pages=65, chunk_pages=1)], prefill, prefill)
        prefill.cont(0)
        cluster.finish(20)


def test_settings_that_the_coordinator_refuses_are_told(forks: ForkServer) -> None:
    bad = ClusterOptions(layout=small_layout(1), coordinator={"handoff": {"deadline_s": -1}})
    with Cluster(bad, forks) as cluster, pytest.raises(SimulationError, match=r"handoff\.deadline_s"):
        cluster.wait_until(lambda: False, 10, "nothing")


def test_nothing_outlives_a_driver_that_is_killed(short_dir: Path) -> None:
    program = (
        "import sys\n"
        "from coordinator.messages import Role\n"
        "from coordinator.sim.cluster import Cluster\n"
        "from coordinator.sim.options import ClusterOptions, small_layout\n"
        "with Cluster(ClusterOptions(layout=small_layout(1), pages=64)) as cluster:\n"
        "    group = cluster.add(Role.PREFILL, 'prefill-0', 1)\n"
        "    cluster.wait_ready()\n"
        "    print(cluster.coordinator.pid, group.children[0].pid, flush=True)\n"
        "    cluster.wait_until(lambda: False, 60, 'nothing')\n"
    )
    output = short_dir / "pids"
    with output.open("wb") as file:
        driver = psutil.Popen(
            [sys.executable, "-c", program], stdout=file, env={**os.environ, "TMPDIR": str(short_dir)}
        )
    eventually(lambda: output.read_text().endswith("\n"), 30, "the driver to be ready")
    pids = [int(pid) for pid in output.read_text().split()]
    everybody = driver.children(recursive=True)
    assert {process.pid for process in everybody} >= set(pids)
    driver.kill()
    driver.wait(10)
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert not alive
