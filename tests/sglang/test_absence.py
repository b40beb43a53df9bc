"""The plugin and a coordinator that is not there, dies, and comes back: no request is lost by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sglang.rig import Coordinator, Engine, outcome, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sglang.rig import Host

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def coordinator(place: Path) -> Iterator[Coordinator]:
    """A coordinator that a test may kill."""
    coordinator = Coordinator(place, deadline_s=6.0)
    yield coordinator
    coordinator.close()


def is_off(engine: Engine) -> bool:
    """Whether SGLang's own poll goes on, on all ranks."""
    return not any(report["switches"] and report["switches"][-1][1] for report in engine.reports())


def begin(engine: Engine, *rooms: int) -> None:
    """Have the ranks complete the prefill of these rooms, and wait until their transfers are under way."""
    engine.say(f"prefill {' '.join(map(str, rooms))}")
    engine.in_flight(*rooms)


def deadlines(coordinator: Coordinator) -> int:
    """How many handoffs have failed at their deadline."""
    return int(coordinator.ask("/v1/status")["failed"].get("deadline", 0))


def test_a_coordinator_that_dies_and_comes_back_loses_no_request(
    host: Host, coordinator: Coordinator, place: Path
) -> None:
    with Engine(host, place, 2, coordinator.address) as engine:
        until(engine.is_on, "the coordinator decides")
        begin(engine, 1, 2, 3, 4)
        engine.ask(0, "done", 1)  # half of it before, half of it while it is away
        coordinator.kill()
        until(lambda: is_off(engine), "the ranks go on without it")
        begin(engine, 5, 6)
        engine.ask(1, "done", 1)
        engine.all("done", 2)
        engine.all("failed", 5)
        reports = engine.done(1, 2, 5)
        assert [outcome(reports, room).kind for room in (1, 2, 5)] == ["succeeded", "succeeded", "failed"]
        coordinator.start()
        until(engine.is_on, "the coordinator is back")
        # What was in flight before and what came meanwhile has its bound again; what is done is done.
        engine.all("done", 3)
        engine.all("done", 6)
        begin(engine, 7)
        engine.ask(1, "failed", 7)
        engine.ask(0, "done", 7)
        until(lambda: deadlines(coordinator), "the deadline of room 4")
        engine.all("drained", 4)
        reports = engine.done(3, 4, 6, 7)
        assert [outcome(reports, room).kind for room in (3, 6, 7)] == ["succeeded", "succeeded", "failed"]
        assert "deadline" in outcome(reports, 4).message
        # All ranks have switched in the same steps.
        assert reports[0]["switches"] == reports[1]["switches"]
        assert [on for _, on in reports[0]["switches"]] == [True, False, True]
        assert engine.logs().count("is not there: SGLang's own poll goes on") == 2  # once for each rank
        until(coordinator.holds_nothing, "nothing is held for what has begun anew")


def test_a_coordinator_that_is_killed_again_and_again_loses_no_request(
    host: Host, coordinator: Coordinator, place: Path
) -> None:
    with Engine(host, place, 2, coordinator.address) as engine:
        for round_ in range(3):
            until(engine.is_on, "the coordinator decides")
            rooms = [10 * round_ + number for number in range(1, 6)]
            begin(engine, *rooms)
            for room in rooms[:2]:
                engine.all("done", room)
            coordinator.kill()
            for room in rooms[2:4]:
                engine.all("done", room)
            coordinator.start()
            engine.all("done", rooms[4])
            reports = engine.done(*rooms)
            assert [outcome(reports, room).kind for room in rooms] == ["succeeded"] * 5
            assert reports[0]["switches"] == reports[1]["switches"]
        until(engine.is_on, "the coordinator decides")
        until(coordinator.holds_nothing, "nothing is held for what has begun anew")


def test_an_engine_starts_without_its_coordinator(host: Host, coordinator: Coordinator, place: Path) -> None:
    coordinator.kill()
    with Engine(host, place, 2, coordinator.address) as engine:
        begin(engine, 1, 2)
        engine.all("done", 1)
        assert outcome(engine.done(1), 1).kind == "succeeded"
        coordinator.start()
        until(engine.is_on, "the coordinator decides")
        # It began without a bound, and has one now.
        until(lambda: deadlines(coordinator), "its deadline")
        engine.all("drained", 2)
        assert "deadline" in outcome(engine.done(2), 2).message
        until(coordinator.holds_nothing, "nothing is held")


def test_a_coordinator_that_ends_in_good_order_hands_its_requests_back(
    host: Host, coordinator: Coordinator, place: Path
) -> None:
    with Engine(host, place, 2, coordinator.address) as engine:
        until(engine.is_on, "the coordinator decides")
        begin(engine, 1)
        coordinator.hurry()
        until(lambda: is_off(engine), "the ranks go on without it")
        engine.all("done", 1)
        assert outcome(engine.done(1), 1).kind == "succeeded"
