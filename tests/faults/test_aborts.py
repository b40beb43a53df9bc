"""A thousand requests are given up within a second, with real processes and pages."""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from coordinator.client import Outcome, Released
from tests.client.engines import Engines
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from coordinator.client.rank import Rank
    from tests.support.processes import Programs

ROOMS = range(1, 1001)


@pytest.fixture
def engines(programs: Programs, short_dir: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(programs, short_dir, stack)


def ended(engines: Engines, rank: Rank) -> bool:
    """Whether a rank has a verdict and a release of every room."""
    had = engines.events.setdefault(rank, [])
    had.extend(rank.drain())
    return len(had) >= 2 * len(ROOMS)


@pytest.mark.parametrize("moves", [False, True], ids=["waiting", "with pages on their way"])
def test_a_thousand_aborts_in_a_second(engines: Engines, moves: bool) -> None:  # noqa: FBT001 - of pytest
    """Case C24: all are terminal within 2 s on both sides, and nothing is left behind."""
    for room in ROOMS:
        engines.decode.offer(room, [room % 16])
        if moves:
            engines.prefill.send(room, [room % 16])
        else:
            engines.prefill.open(room)
    for rank in (engines.decode, engines.prefill):
        eventually(lambda rank=rank: not len(rank._conversation.outbox), 20, "all are in flight")  # type: ignore[misc]
    began_s = time.monotonic()
    for room in ROOMS:
        engines.decode.cancel(room, "the client has hung up")
    for rank in (engines.decode, engines.prefill):
        eventually(lambda rank=rank: ended(engines, rank), 20, "all are over")  # type: ignore[misc]
    assert time.monotonic() - began_s < 2.0
    for rank in (engines.decode, engines.prefill):
        events = engines.events[rank]
        outcomes = [event for event in events if isinstance(event, Outcome)]
        assert sorted(event.room for event in outcomes) == list(ROOMS)
        assert sorted(event.room for event in events if isinstance(event, Released)) == list(ROOMS)
        assert {outcome.failure.reason.value for outcome in outcomes if outcome.failure} == {
            "cancelled_by_decode"
        }
    engines.hand_over(7, attempt=2)
    engines.coordinator.program.process.send_signal(signal.SIGTERM)
    assert engines.coordinator.program.wait(20) == 0
    last = json.loads(engines.coordinator.program.output().splitlines()[-1])
    assert (last["event"], last["opened"], last["succeeded"]) == ("coordinator.stopped", 1001, 1)
    assert last["failed"] == {"cancelled_by_decode": 1000}
