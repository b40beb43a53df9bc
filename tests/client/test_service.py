"""Ranks against the coordinator itself, with real workers and pages."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator.client import (
    Outcome,
    PrefillRank,
    RankState,
    Reason,
    Released,
)
from coordinator.errors import RefusedError
from tests.client.engines import Engines
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.processes import Programs


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

    engines.coordinator.kill()
    for rank in (engines.prefill, engines.decode):
        eventually(lambda rank=rank: rank.state is RankState.COORDINATOR_AWAY, 10, "away")  # type: ignore[misc]
    # Said while nobody hears it.
    engines.source.tensor[:, 7] = 99
    engines.prefill.send(3, [7], last=True)
    engines.decode.offer(3, [9])

    engines.coordinator.serve()
    engines.ready()
    for rank in (engines.prefill, engines.decode):
        engines.until(rank, Outcome(3, 1), Released(3, 1))
        outcome = engines.outcome(rank, 2)
        assert outcome.failure is not None
        assert outcome.failure.reason is Reason.COORDINATOR_RESTARTED
        engines.until(rank, Released(2, outcome.attempt))
    assert torch.equal(engines.target.tensor[:, 9], engines.source.tensor[:, 7])
    engines.hand_over(1, attempt=2)
