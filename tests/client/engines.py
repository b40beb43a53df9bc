"""A coordinator, and two engines of one rank each, with real workers and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from coordinator.client import DecodeRank, Endpoint, KVPool, Outcome, PrefillRank, Released
from tests.client.coordinator import Coordinator
from tests.client.peer import LAYOUT
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from coordinator.client.rank import Rank
    from coordinator.messages import Event
    from tests.support.processes import Programs


@dataclass
class Engines:
    """A coordinator, a prefill engine of one rank, and a decode engine of one rank."""

    programs: Programs
    directory: Path
    stack: ExitStack
    events: dict[Rank, list[Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.programs, self.directory, lost_after_s=3.0)
        self.address = self.coordinator.address
        self.source = self.stack.enter_context(KVPool.allocate(LAYOUT, 16))
        self.target = self.stack.enter_context(KVPool.allocate(LAYOUT, 16))
        self.endpoint = self.stack.enter_context(Endpoint(self.target, backend="loopback"))
        self.prefill = self.stack.enter_context(
            PrefillRank.connect(self.address, group="p", rank=0, world_size=1, pool=self.source)
        )
        self.decode = self.stack.enter_context(
            DecodeRank.connect(
                self.coordinator.address, group="d", rank=0, world_size=1, endpoint=self.endpoint
            )
        )
        self.ready()

    def ready(self) -> None:
        """Wait until both engines hear the coordinator."""
        for rank in (self.prefill, self.decode):
            rank.wait_ready(15)

    def until(self, rank: Rank, *wanted: Event) -> None:
        """Drain until the rank has had these events."""
        had = self.events.setdefault(rank, [])

        def came() -> bool:
            had.extend(rank.drain())
            return all(event in had for event in wanted)

        eventually(came, 15, str(wanted))

    def outcome(self, rank: Rank, room: int) -> Outcome:
        """Drain until the rank has the verdict of a room."""
        had = self.events.setdefault(rank, [])

        def came() -> list[Outcome]:
            had.extend(rank.drain())
            return [event for event in had if isinstance(event, Outcome) and event.room == room]

        found = eventually(came, 15, f"the outcome of {room}")
        assert len(found) == 1
        return found[0]

    def hand_over(self, room: int, attempt: int = 1) -> None:
        """Hand two pages over and compare them."""
        self.source.tensor[:, 3] = room % 251
        self.source.tensor[:, 4] = room % 241
        self.decode.offer(room, [8, 1])
        self.prefill.send(room, [3, 4], last=True, aux=b"first token")
        self.until(self.prefill, Outcome(room, attempt), Released(room, attempt))
        self.until(self.decode, Outcome(room, attempt, aux=b"first token"), Released(room, attempt))
        assert torch.equal(self.target.tensor[:, 8], self.source.tensor[:, 3])
        assert torch.equal(self.target.tensor[:, 1], self.source.tensor[:, 4])
