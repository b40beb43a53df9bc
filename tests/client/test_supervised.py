"""Ranks of an engine that moves the pages by itself, and a real coordinator."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.client import Outcome, RankState, Released, SupervisedRank
from coordinator.errors import ProtocolError
from tests.sglang.rig import Coordinator, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.messages import Event


@pytest.fixture
def ranks() -> Iterator[list[SupervisedRank]]:
    """Two ranks that are ready."""
    with ExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="kv-"))
        coordinator = Coordinator(Path(place), deadline_s=60.0)
        stack.callback(coordinator.close)
        ranks = [
            stack.enter_context(
                SupervisedRank.connect(coordinator.address, group="own", rank=rank, world_size=2)
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.wait_ready(30.0)
        yield ranks


def events(rank: SupervisedRank, count: int) -> list[Event]:
    """Wait for so many events."""
    found: list[Event] = []

    def enough() -> bool:
        found.extend(rank.drain())
        return len(found) >= count

    until(enough, f"{count} events")
    return found


def test_it_succeeds_when_both_transfers_are_done(ranks: list[SupervisedRank]) -> None:
    for rank in ranks:
        rank.complete(7)
        rank.leg_done(7)
    for rank in ranks:
        assert events(rank, 2) == [Outcome(7, 1), Released(7, 1)]


def test_a_failure_is_heard_by_both_and_its_pages_are_released_when_both_are_quiet(
    ranks: list[SupervisedRank],
) -> None:
    for rank in ranks:
        rank.complete(7)
    ranks[1].leg_failed(7, "the link broke")
    for rank in ranks:
        (outcome,) = events(rank, 1)
        assert isinstance(outcome, Outcome)
        assert outcome.failure is not None
        assert (outcome.failure.origin, outcome.failure.message) == ("own/1", "the link broke")
    ranks[1].leg_quiet(7, 1)
    ranks[0].complete(8)
    ranks[1].complete(8)
    ranks[0].leg_quiet(7, 1)
    for rank in ranks:
        assert events(rank, 1) == [Released(7, 1)]


def test_there_is_a_token_for_all_only_while_all_are_heard(ranks: list[SupervisedRank]) -> None:
    assert ranks[0].ready_head() == ranks[0].head
    ranks[1].close()
    until(lambda: ranks[0].state is not RankState.READY, "one is missing")
    assert ranks[0].ready_head() is None


def test_a_room_that_cannot_be_is_refused_at_once(ranks: list[SupervisedRank]) -> None:
    for method in (ranks[0].complete, ranks[0].leg_done, lambda room: ranks[0].leg_quiet(room, 1)):
        with pytest.raises(ProtocolError, match="room is 0"):
            method(0)


def test_an_attempt_that_cannot_be_is_refused_at_once(ranks: list[SupervisedRank]) -> None:
    impossible: tuple[Any, ...] = (0, -1, 2**62 + 1, 1.0, None)
    for attempt in impossible:
        with pytest.raises(ProtocolError, match=f"attempt is {attempt}"):
            ranks[0].leg_quiet(7, attempt)
