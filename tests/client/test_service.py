"""Ranks against the coordinator itself, with real workers and pages."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator.client import (
    DecodeRank,
    Endpoint,
    KVPool,
    Outcome,
    PrefillRank,
    RankState,
    Reason,
    Released,
)
from coordinator.errors import RefusedError
from tests.client.peer import LAYOUT
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
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
name = "loopback"
[rank]
heartbeat_s = 0.2
lost_after_s = 3.0
reattach_s = 1.0
[release]
settle_s = 0.5
drain_s = 0.5
"""


@dataclass
class Engines:
    """A coordinator, a prefill engine of one rank, and a decode engine of one rank."""

    programs: Programs
    directory: Path
    stack: ExitStack
    events: dict[Rank, list[Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.address = f"ipc://{self.directory}/control"
        (self.directory / "config.toml").write_text(CONFIG.format(directory=self.directory))
        self.coordinator = self.serve()
        self.source = self.stack.enter_context(KVPool.allocate(LAYOUT, 16))
        self.target = self.stack.enter_context(KVPool.allocate(LAYOUT, 16))
        self.endpoint = self.stack.enter_context(Endpoint(self.target, backend="loopback"))
        self.prefill = self.stack.enter_context(
            PrefillRank.connect(self.address, group="p", rank=0, world_size=1, pool=self.source)
        )
        self.decode = self.stack.enter_context(
            DecodeRank.connect(self.address, group="d", rank=0, world_size=1, endpoint=self.endpoint)
        )
        self.ready()

    def serve(self) -> Program:
        """Start a coordinator."""
        # One that is killed leaves its own socket files behind: let them be ours to remove.
        program = self.programs.python(
            "-m",
            "coordinator",
            "serve",
            "--config",
            str(self.directory / "config.toml"),
            environment={"TMPDIR": str(self.directory)},
        )
        program.says("coordinator.ready")
        return program

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


@pytest.fixture
def engines(programs: Programs, short_dir: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(programs, short_dir, stack)


def test_pages_are_handed_over_and_rooms_are_used_again(engines: Engines) -> None:
    engines.hand_over(77)
    engines.hand_over(78)
    engines.hand_over(77, attempt=2)


def test_what_either_side_gives_up_fails_on_both(engines: Engines) -> None:
    engines.prefill.send(5, [1])
    engines.decode.offer(5, [2, 3])
    engines.decode.cancel(5, "no more memory")
    for rank in (engines.prefill, engines.decode):
        outcome = engines.outcome(rank, 5)
        assert outcome.failure is not None
        assert outcome.failure.reason is Reason.CANCELLED_BY_DECODE
        assert outcome.failure.message == "no more memory"
        assert outcome.failure.origin == "d/0"
        engines.until(rank, Released(5, 1))


def test_a_second_rank_with_the_same_number_is_refused(engines: Engines) -> None:
    with PrefillRank.connect(engines.address, group="p", rank=0, world_size=1, pool=engines.source) as second:
        with pytest.raises(RefusedError, match="is taken by pid"):
            second.wait_ready(15)
        assert second.state is RankState.REFUSED
    engines.hand_over(1)


def test_ranks_outlive_a_coordinator_that_was_killed(engines: Engines) -> None:
    engines.hand_over(1)
    engines.prefill.open(2)
    engines.decode.offer(2, [5])
    eventually(lambda: not len(engines.decode._conversation.outbox), 10, "the offer is confirmed")
    eventually(lambda: not len(engines.prefill._conversation.outbox), 10, "the room is announced")

    engines.coordinator.process.kill()
    engines.coordinator.wait()
    for rank in (engines.prefill, engines.decode):
        eventually(lambda rank=rank: rank.state is RankState.COORDINATOR_AWAY, 10, "away")  # type: ignore[misc]
    # Said while nobody hears it.
    engines.source.tensor[:, 7] = 99
    engines.prefill.send(3, [7], last=True)
    engines.decode.offer(3, [9])

    engines.serve()
    engines.ready()
    for rank in (engines.prefill, engines.decode):
        engines.until(rank, Outcome(3, 1), Released(3, 1))
        outcome = engines.outcome(rank, 2)
        assert outcome.failure is not None
        assert outcome.failure.reason is Reason.COORDINATOR_RESTARTED
        engines.until(rank, Released(2, outcome.attempt))
    assert torch.equal(engines.target.tensor[:, 9], engines.source.tensor[:, 7])
    engines.hand_over(1, attempt=2)
