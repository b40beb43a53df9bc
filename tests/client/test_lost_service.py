"""The coordinator itself is killed for good, or stands still past the verdict; real workers and pages."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator.client import (
    ClientSettings,
    DecodeRank,
    Endpoint,
    KVPool,
    Layout,
    Outcome,
    PrefillRank,
    RankState,
    Reason,
    Released,
)
from tests.backends.rigs import needs_nixl
from tests.client.peer import LAYOUT
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from coordinator.client.rank import Rank
    from coordinator.messages import Event
    from tests.support.processes import Program, Programs

CONFIG = """
[listen]
control = ["ipc://{directory}/control"]
outcomes = ["ipc://{directory}/outcomes"]
[http]
address = ""
[backend]
name = "{backend}"
hosting = "{hosting}"
[backend.options.loopback]
control = "{directory}/faults.toml"
[rank]
heartbeat_s = 0.2
lost_after_s = 1.0
reattach_s = 0.8
[release]
settle_s = 0.5
drain_s = 0.5
"""
SIZE = 2
SETTINGS = ClientSettings(coordinator_lost_s=2.0, away_after_s=0.5, hello_retry_s=0.1)
#: Every write hangs after 256 bytes.
STALL = '[[faults]]\nkind = "stall"\nafter_bytes = 256\n'


@dataclass
class Engine:
    """The ranks of one engine, in lockstep."""

    ranks: Sequence[Rank]
    pools: Sequence[KVPool]
    events: list[Event] = field(default_factory=list)
    steps: list[list[Event]] = field(default_factory=list)

    def step(self) -> None:
        """Let all ranks make a step, in which they must apply the same."""
        token = self.ranks[0].head
        applied = [list(rank.drain(through=token)) for rank in self.ranks]
        assert all(events == applied[0] for events in applied)
        self.events += applied[0]
        if applied[0]:
            self.steps.append(applied[0])

    def outcomes(self) -> dict[tuple[int, int], Reason | None]:
        """What became of each attempt; it must have become one thing only."""
        found: dict[tuple[int, int], Reason | None] = {}
        for event in self.events:
            if isinstance(event, Outcome):
                assert (event.room, event.attempt) not in found, "a second outcome"
                found[event.room, event.attempt] = None if event.failure is None else event.failure.reason
        return found

    def released(self) -> list[tuple[int, int]]:
        """Which attempts' pages are free again."""
        found = [(event.room, event.attempt) for event in self.events if isinstance(event, Released)]
        assert len(found) == len(set(found)), "a second release"
        return found


def private_pool(layout: Layout, pages: int, world_size: int) -> KVPool:
    """A pool in memory that only this process has."""
    memory = torch.zeros(layout.pool_bytes(pages, world_size), dtype=torch.uint8)
    return KVPool.wrap([memory], layout, world_size)


class Deployment:
    """A coordinator, a prefill engine and a decode engine."""

    def __init__(
        self,
        programs: Programs,
        directory: Path,
        stack: ExitStack,
        backend: str,
        way: Callable[[str], str] = lambda address: address,
        hosting: str = "coordinator",
    ) -> None:
        """Start all; decode ranks go to the coordinator's address by ``way``."""
        self.programs = programs
        self.directory = directory
        self.address = f"ipc://{directory}/control"
        (directory / "faults.toml").write_text("")
        (directory / "config.toml").write_text(
            CONFIG.format(directory=directory, backend=backend, hosting=hosting)
        )
        self.coordinator = self.serve()
        make = KVPool.allocate if hosting == "coordinator" else private_pool
        sources = [stack.enter_context(make(LAYOUT, 16, SIZE)) for _ in range(SIZE)]
        targets = [stack.enter_context(KVPool.allocate(LAYOUT, 16, SIZE)) for _ in range(SIZE)]
        self.endpoints = [stack.enter_context(Endpoint(pool, backend)) for pool in targets]
        self.prefill = Engine(
            [
                stack.enter_context(
                    PrefillRank.connect(
                        self.address, group="p", rank=rank, world_size=SIZE, pool=pool, settings=SETTINGS
                    )
                )
                for rank, pool in enumerate(sources)
            ],
            sources,
        )
        self.decode = Engine(
            [
                stack.enter_context(
                    DecodeRank.connect(
                        way(self.address),
                        group="d",
                        rank=rank,
                        world_size=SIZE,
                        endpoint=endpoint,
                        settings=SETTINGS,
                    )
                )
                for rank, endpoint in enumerate(self.endpoints)
            ],
            targets,
        )
        self.ready()

    def serve(self) -> Program:
        """Start a coordinator."""
        program = self.programs.python(
            "-m", "coordinator", "serve", "--config", str(self.directory / "config.toml"),
            environment={"TMPDIR": str(self.directory)},
        )  # fmt: skip
        program.says("coordinator.ready")
        return program

    def ready(self) -> None:
        """Wait until both engines hear the coordinator."""
        for rank in (*self.prefill.ranks, *self.decode.ranks):
            rank.wait_ready(20)

    def run(self, until: Callable[[], bool], what: str) -> None:
        """Let both engines make steps until it is so."""

        def came() -> bool:
            for engine in (self.prefill, self.decode):
                engine.step()
            return until()

        eventually(came, 25, what)

    def offer(self, room: int, page: int) -> None:
        for rank in self.decode.ranks:
            assert isinstance(rank, DecodeRank)
            rank.offer(room, [page])

    def send(self, room: int, page: int) -> None:
        for rank in self.prefill.ranks:
            assert isinstance(rank, PrefillRank)
            rank.send(room, [page], last=True)

    def hand_over(self, room: int, page: int) -> None:
        """Hand a page over and compare it."""
        before = [len(engine.released()) for engine in (self.prefill, self.decode)]
        for number, pool in enumerate(self.prefill.pools):
            pool.tensor[:, page] = room % 200 + number
        self.offer(room, page)
        self.send(room, page)

        def released(engine: Engine, count: int) -> bool:
            return len(engine.released()) > count

        self.run(
            lambda: released(self.prefill, before[0]) and released(self.decode, before[1]),
            "it is handed over",
        )
        for engine in (self.prefill, self.decode):
            (reason,) = {reason for (of, _), reason in list(engine.outcomes().items())[-1:] if of == room}
            assert reason is None
        for source, target in zip(self.prefill.pools, self.decode.pools, strict=True):
            assert torch.equal(source.tensor[:, page], target.tensor[:, page])

    def both_lost(self) -> None:
        """Run until both engines have lost the coordinator."""
        self.run(
            lambda: all(
                Reason.COORDINATOR_LOST in engine.outcomes().values()
                for engine in (self.prefill, self.decode)
            ),
            "the coordinator is lost on both sides",
        )


@pytest.fixture(autouse=True)
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of an engine are in this process: they come to their proofs together."""
    monkeypatch.setattr("coordinator.client.lives.QUIET_HOLD_S", 0.1)


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
    deployment.coordinator.process.kill()
    deployment.coordinator.wait()
    killed_s = time.monotonic()
    deployment.send(6, 6)
    deployment.both_lost()
    assert time.monotonic() - killed_s > 1.5
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
    deployment.serve()
    deployment.ready()
    deployment.hand_over(3, 3)
    deployment.hand_over(77, 7)


@loopback_only
def test_a_coordinator_that_stood_still_past_the_verdict(deployment: Deployment) -> None:
    """Cases C16 and C24: it and its workers go on as if nothing had been; nothing changes for what failed."""
    deployment.hand_over(1, 1)
    for pool in deployment.prefill.pools:
        pool.tensor[:, 2:4] = 99
    (deployment.directory / "faults.toml").write_text(STALL)
    deployment.offer(2, 2)
    deployment.send(2, 2)
    eventually(lambda: moving(deployment), 10, "the workers have begun to write")
    pid = deployment.coordinator.process.pid
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
    (deployment.directory / "faults.toml").write_text("")
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
    (deployment.directory / "faults.toml").write_text(STALL)
    deployment.offer(2, 2)
    deployment.send(2, 2)
    eventually(lambda: moving(deployment), 10, "the workers have begun to write")
    pid = deployment.coordinator.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        deployment.both_lost()
        deployment.run(
            lambda: len(deployment.prefill.released()) == len(deployment.decode.released()) == 2,
            "all pages are back",
        )
        before = [pool.tensor.clone() for pool in deployment.decode.pools]
        (deployment.directory / "faults.toml").write_text("")
    finally:
        os.kill(pid, signal.SIGCONT)
    deployment.ready()
    for pool, tensor in zip(deployment.decode.pools, before, strict=True):
        assert torch.equal(pool.tensor, tensor), "bytes of a former life have landed"
    deployment.hand_over(2, 2)
    deployment.hand_over(4, 4)
    assert deployment.prefill.outcomes()[2, 1] is Reason.COORDINATOR_LOST


def moving(deployment: Deployment) -> bool:
    """Whether a page of room 2 has begun to arrive on every decode rank."""
    return all(bool(pool.tensor[0, 2].any()) for pool in deployment.decode.pools)


@loopback
def test_a_coordinator_that_is_replaced_in_time(deployment: Deployment) -> None:
    for rank in deployment.prefill.ranks:
        assert isinstance(rank, PrefillRank)
        rank.open(2)
    deployment.offer(2, 2)
    eventually(
        lambda: not any(len(rank._conversation.outbox) for rank in deployment.decode.ranks), 10, "confirmed"
    )
    deployment.coordinator.process.kill()
    deployment.coordinator.wait()
    for rank in deployment.decode.ranks:
        eventually(lambda rank=rank: rank.state is RankState.COORDINATOR_AWAY, 10, "away")  # type: ignore[misc]
    deployment.serve()
    deployment.ready()
    deployment.run(
        lambda: all(len(engine.released()) == 1 for engine in (deployment.prefill, deployment.decode)),
        "it is over",
    )
    for engine in (deployment.prefill, deployment.decode):
        assert set(engine.outcomes().values()) == {Reason.COORDINATOR_RESTARTED}
    assert {endpoint.renewals for endpoint in deployment.endpoints} == {0}
    deployment.hand_over(3, 3)
