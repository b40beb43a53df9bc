"""The coordinator itself is killed for good, or stands still past the verdict; real workers and pages."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator.client import (
    Outcome,
    PrefillRank,
    RankState,
    Reason,
)
from tests.backends.rigs import needs_nixl
from tests.client.deployment import SETTINGS, Deployment, moving
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.processes import Programs

pytestmark = pytest.mark.usefixtures("short_hold")


@pytest.fixture(
    params=[
        "coordinator loopback",
        pytest.param("coordinator nixl", marks=needs_nixl),
        "rank loopback",
        pytest.param("rank nixl", marks=needs_nixl),
    ]
)
def deployment(programs: Programs, short_dir: Path, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    hosting, backend = request.param.split()
    with ExitStack() as stack:
        yield Deployment(programs, short_dir, stack, backend, hosting=hosting)


loopback_only = pytest.mark.parametrize("deployment", ["coordinator loopback"], indirect=True)
loopback = pytest.mark.parametrize("deployment", ["coordinator loopback", "rank loopback"], indirect=True)


def test_the_node_of_the_coordinator_is_gone_for_good(deployment: Deployment) -> None:
    """Case C24: one step, once, and the pages are back; and a coordinator that comes at last serves all."""
    deployment.hand_over(1, 1)
    for room in (5, 3, 4):
        deployment.offer(room, room)
        for rank in deployment.prefill.ranks:
            assert isinstance(rank, PrefillRank)
            rank.send(room, [room])
    deployment.offer(9, 9)
    deployment.coordinator.kill()
    killed_s = time.monotonic()
    deployment.send(6, 6)
    deployment.both_lost()
    assert time.monotonic() - killed_s > SETTINGS.coordinator_lost_s - 0.5
    lost = Reason.COORDINATOR_LOST
    for engine, rooms in ((deployment.prefill, [3, 4, 5, 6]), (deployment.decode, [3, 4, 5, 9])):
        (step,) = [events for events in engine.steps if any(event.room in rooms for event in events)][:1]
        assert [event.room for event in step if isinstance(event, Outcome)] == rooms
        assert engine.outcomes() == {(1, 1): None, **{(room, 1): lost for room in rooms}}
    deployment.run(
        lambda: all(
            rank.unreleased == 0
            for engine in (deployment.prefill, deployment.decode)
            for rank in engine.ranks
        ),
        "all pages are back",
    )
    assert sorted(deployment.prefill.released()) == [(1, 1), (3, 1), (4, 1), (5, 1), (6, 1)]
    assert sorted(deployment.decode.released()) == [(1, 1), (3, 1), (4, 1), (5, 1), (9, 1)]
    assert {endpoint.renewals for endpoint in deployment.endpoints} == {1}
    deployment.coordinator.serve()
    deployment.ready()
    deployment.hand_over(3, 3)
    deployment.hand_over(77, 7)


@loopback_only
def test_a_coordinator_that_stood_still_past_the_verdict(deployment: Deployment) -> None:
    """Cases C16 and C24: it and its workers go on as if nothing had been; nothing changes for what failed."""
    deployment.hand_over(1, 1)
    for pool in deployment.prefill.pools:
        pool.tensor[:, 2:4] = 99
    deployment.coordinator.stall()
    deployment.offer(2, 2)
    deployment.send(2, 2)
    eventually(lambda: moving(deployment), 10, "the workers have begun to write")
    pid = deployment.coordinator.program.process.pid
    os.kill(pid, signal.SIGSTOP)
    # What it will read when it goes on.
    deployment.offer(3, 3)
    deployment.send(3, 3)
    deployment.both_lost()
    lost = {(1, 1): None, (2, 1): Reason.COORDINATOR_LOST, (3, 1): Reason.COORDINATOR_LOST}
    assert deployment.prefill.outcomes() == deployment.decode.outcomes() == lost
    # Decode's pages need nobody: its former endpoint is gone, and no copy to it is under way.
    deployment.run(lambda: len(deployment.decode.released()) == 3, "decode's pages are back")
    # The workers live, and may read prefill's at any time.
    assert [rank.unreleased for rank in deployment.prefill.ranks] == [2, 2]
    before = [pool.tensor.clone() for pool in deployment.decode.pools]
    deployment.coordinator.flow()
    os.kill(pid, signal.SIGCONT)
    deployment.run(lambda: len(deployment.prefill.released()) == 3, "prefill's pages are back")
    deployment.ready()
    for pool, tensor in zip(deployment.decode.pools, before, strict=True):
        assert torch.equal(pool.tensor, tensor), "bytes of a former life have landed"
    deployment.hand_over(2, 2)
    deployment.hand_over(4, 4)
    assert len(deployment.prefill.outcomes()) == len(deployment.decode.outcomes()) == 5
    for engine in (deployment.prefill, deployment.decode):
        assert {key: engine.outcomes()[key] for key in lost} == lost


@pytest.mark.parametrize("deployment", ["rank loopback"], indirect=True)
def test_a_worker_of_the_rank_is_fenced_without_its_coordinator(deployment: Deployment) -> None:
    """Cases C16 and C24: it stands still past the verdict; nobody waits for it to have pages back."""
    deployment.hand_over(1, 1)
    for pool in deployment.prefill.pools:
        pool.tensor[:, 2] = 99
    deployment.coordinator.stall()
    deployment.offer(2, 2)
    deployment.send(2, 2)
    eventually(lambda: moving(deployment), 10, "the workers have begun to write")
    pid = deployment.coordinator.program.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        deployment.both_lost()
        deployment.run(
            lambda: len(deployment.prefill.released()) == len(deployment.decode.released()) == 2,
            "all pages are back",
        )
        before = [pool.tensor.clone() for pool in deployment.decode.pools]
        deployment.coordinator.flow()
    finally:
        os.kill(pid, signal.SIGCONT)
    deployment.ready()
    for pool, tensor in zip(deployment.decode.pools, before, strict=True):
        assert torch.equal(pool.tensor, tensor), "bytes of a former life have landed"
    deployment.hand_over(2, 2)
    deployment.hand_over(4, 4)
    assert deployment.prefill.outcomes()[2, 1] is Reason.COORDINATOR_LOST


@loopback
def test_a_coordinator_that_is_replaced_in_time(deployment: Deployment) -> None:
    for rank in deployment.prefill.ranks:
        assert isinstance(rank, PrefillRank)
        rank.open(2)
    deployment.offer(2, 2)
    eventually(
        lambda: not any(len(rank._conversation.outbox) for rank in deployment.decode.ranks), 10, "confirmed"
    )
    deployment.coordinator.kill()
    for rank in deployment.decode.ranks:
        eventually(lambda rank=rank: rank.state is RankState.COORDINATOR_AWAY, 10, "away")  # type: ignore[misc]
    deployment.coordinator.serve()
    deployment.ready()
    deployment.run(
        lambda: all(len(engine.released()) == 1 for engine in (deployment.prefill, deployment.decode)),
        "it is over",
    )
    for engine in (deployment.prefill, deployment.decode):
        assert set(engine.outcomes().values()) == {Reason.COORDINATOR_RESTARTED}
    assert {endpoint.renewals for endpoint in deployment.endpoints} == {0}
    deployment.hand_over(3, 3)
