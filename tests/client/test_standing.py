"""Where a client stands: what people are told of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from coordinator.client.standing import RankState, Standing
from coordinator.messages import Refused

if TYPE_CHECKING:
    import pytest


def standing() -> Standing:
    return Standing("g/0", "somewhere", 60.0)


def test_a_rank_that_hears_no_broadcast_says_where_it_listens() -> None:
    stands = standing()
    stands.outcomes = "tcp://there:1"
    stands.become(RankState.JOINED)
    waits = "the coordinator at somewhere still waits for other ranks of the group"
    assert stands.explain() == f"{waits}, and nothing was heard yet from tcp://there:1, where it broadcasts"
    stands.missing = [1, 3]
    assert stands.explain() == f"{waits}: g/1, g/3"


def test_what_was_not_accepted_is_told_until_all_is_well() -> None:
    stands = standing()
    stands.refused(Refused("contested", "rank 0 of g is taken"))
    never = "no coordinator at somewhere has accepted this rank yet"
    assert stands.explain() == f"{never}; it said: rank 0 of g is taken"
    stands.become(RankState.READY)
    stands.become(RankState.COORDINATOR_AWAY)
    assert stands.explain() == "the coordinator at somewhere is away; its return is awaited for 60 s"


def test_only_a_coordinator_that_goes_away_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    stands = standing()
    with caplog.at_level(logging.INFO, logger="coordinator.client"):
        for state in (RankState.READY, RankState.READY, RankState.COORDINATOR_AWAY, RankState.JOINED):
            stands.become(state)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "g/0 is ready (before: connecting)"),
        ("WARNING", "g/0 is coordinator_away (before: ready)"),
        ("INFO", "g/0 is joined (before: coordinator_away)"),
    ]
