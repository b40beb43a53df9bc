"""A coordinator, and two engines of two ranks each in lockstep, which lose it soon."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from coordinator.client import (
    ClientSettings,
    DecodeRank,
    Endpoint,
    KVPool,
    Layout,
    Outcome,
    PrefillRank,
    Reason,
    Released,
)
from tests.client.coordinator import Coordinator
from tests.client.peer import LAYOUT
from tests.client.steps import step
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from coordinator.client.rank import Rank
    from coordinator.messages import Event
    from tests.support.processes import Programs

SIZE = 2
#: They lose the coordinator after it has lost them; neither does because a host stands still for a moment.
SETTINGS = ClientSettings(coordinator_lost_s=6.0, away_after_s=0.5, hello_retry_s=0.1)


@dataclass
class Engine:
    """The ranks of one engine, in lockstep."""

    ranks: Sequence[Rank]
    pools: Sequence[KVPool]
    events: list[Event] = field(default_factory=list)
    steps: list[list[Event]] = field(default_factory=list)

    def step(self) -> None:
        """Let all ranks make a step, in which they must apply the same."""
        applied = step(self.ranks)
        self.events += applied
        if applied:
            self.steps.append(applied)

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
        self.coordinator = Coordinator(programs, directory, backend, hosting)
        self.address = self.coordinator.address
        make = KVPool.allocate if hosting == "coordinator" else private_pool
        sources = [stack.enter_context(make(LAYOUT, 16, SIZE)) for _ in range(SIZE)]
        targets = [stack.enter_context(KVPool.allocate(LAYOUT, 16, SIZE)) for _ in range(SIZE)]
        self.endpoints = [stack.enter_context(Endpoint(pool, backend)) for pool in targets]
        self.prefill = Engine(
            [
                stack.enter_context(
                    PrefillRank.connect(
                        self.coordinator.address,
                        group="p",
                        rank=rank,
                        world_size=SIZE,
                        pool=pool,
                        settings=SETTINGS,
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
            ends = [event for event in engine.events if isinstance(event, Outcome) and event.room == room]
            assert ends[-1].failure is None
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


def moving(deployment: Deployment) -> bool:
    """Whether a page of room 2 has begun to arrive on every decode rank."""
    return all(bool(pool.tensor[0, 2].any()) for pool in deployment.decode.pools)
