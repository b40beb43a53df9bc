"""The plugin in a prefill engine of real SGLang parts: how requests are retired."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from coordinator.integrations.sglang.hooks import STEPS_APART
from tests.sglang.rig import DEADLINE_S, SETTLE_S, Coordinator, Engine, outcome, until, wait

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sglang.rig import Host

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def coordinator(place: Path) -> Iterator[Coordinator]:
    """A coordinator with short bounds."""
    coordinator = Coordinator(place)
    yield coordinator
    coordinator.close()


@pytest.fixture(scope="module")
def engine(host: Host, coordinator: Coordinator, place: Path) -> Iterator[Engine]:
    """An engine of two ranks, which all tests share that do nothing to the engine itself."""
    with Engine(host, place, 2, coordinator.address) as engine:
        until(engine.is_on, "the coordinator decides")
        yield engine


def begin(engine: Engine, *rooms: int) -> None:
    """Have the ranks complete the prefill of these rooms, and wait until their transfers are under way."""
    engine.say(f"prefill {' '.join(map(str, rooms))}")
    engine.in_flight(*rooms)


def test_what_succeeds_is_retired_by_all_ranks_in_one_step(engine: Engine) -> None:
    engine.all("count")
    begin(engine, 11, 12, 13)
    for room in (13, 11, 12):
        engine.all("done", room)
    reports = engine.done(11, 12, 13)
    assert [outcome(reports, room).kind for room in (11, 12, 13)] == ["succeeded"] * 3
    assert [report["calls"].get("all_reduce", 0) for report in reports] == [0, 0]


def test_four_ranks_do_so_too(host: Host, coordinator: Coordinator, place: Path) -> None:
    with Engine(host, place, 4, coordinator.address) as engine:
        until(engine.is_on, "the coordinator decides")
        engine.all("count")
        begin(engine, 1, 2)
        for rank in (3, 1, 0, 2):
            engine.ask(rank, "done", 1)
        engine.ask(2, "failed", 2)
        for rank in (3, 1, 0):
            engine.ask(rank, "done", 2)
        reports = engine.done(1, 2)
        assert outcome(reports, 1).kind == "succeeded"
        assert "transport: the link broke" in outcome(reports, 2).message
        assert [report["calls"].get("all_reduce", 0) for report in reports] == [0] * 4


def test_one_rank_alone_needs_no_other(host: Host, coordinator: Coordinator, place: Path) -> None:
    with Engine(host, place, 1, coordinator.address) as engine:
        until(engine.is_on, "the coordinator decides")
        begin(engine, 1, 2)
        engine.ask(0, "done", 1)
        engine.ask(0, "failed", 2)
        reports = engine.done(1, 2)
        assert [outcome(reports, room).kind for room in (1, 2)] == ["succeeded", "failed"]


def test_a_success_waits_for_the_slowest_rank(engine: Engine) -> None:
    begin(engine, 21)
    engine.ask(0, "done", 21)
    wait(0.3)
    assert all(21 in report["in_flight"] for report in engine.reports())
    engine.ask(1, "done", 21)
    assert outcome(engine.done(21), 21).kind == "succeeded"


def test_a_success_counts_when_the_worker_has_done_with_it(engine: Engine) -> None:
    begin(engine, 31)
    engine.all("early", 31)
    wait(0.3)
    assert all(31 in report["in_flight"] for report in engine.reports())
    engine.all("drained", 31)
    assert outcome(engine.done(31), 31).kind == "succeeded"


def test_a_failure_of_one_rank_fails_it_on_all_and_says_whose_it_was(engine: Engine) -> None:
    begin(engine, 41)
    engine.ask(1, "failed", 41)
    engine.ask(0, "done", 41)
    end = outcome(engine.done(41), 41)
    assert end.kind == "failed"
    assert "transport: the link broke (from sglang-" in end.message
    assert end.message.count("/1)") == 1


def test_pages_are_held_while_a_worker_may_read_them(engine: Engine) -> None:
    """And a success that comes after the verdict changes nothing but that."""
    begin(engine, 51, 52)
    engine.ask(0, "failed", 51)
    wait(0.3)
    engine.all("done", 52)
    # Rank 1 still sends.
    assert all(report["in_flight"] == [51] for report in engine.done(52))
    engine.ask(1, "done", 51)
    end = outcome(engine.done(51), 51)
    assert end.kind == "failed"
    assert "the link broke" in end.message


def test_an_abort_of_the_client_fails_it_on_all_ranks_at_once(engine: Engine) -> None:
    begin(engine, 61)
    engine.say("abort 61")
    wait(0.1)
    engine.all("drained", 61)
    assert "cancelled_by_prefill: the client of the request has gone" in outcome(engine.done(61), 61).message


def test_what_is_not_the_coordinators_is_polled_as_ever_beside_what_is(engine: Engine) -> None:
    """Requests whose decode is not there yet are parked in the same queue."""
    engine.say("park 62 63")
    begin(engine, 64)
    engine.all("done", 64)
    reports = engine.done(64)
    assert outcome(reports, 64).kind == "succeeded"
    assert all(report["in_flight"] == [62, 63] for report in reports)
    engine.say("bootstrap 63 62")
    until(lambda: all({62, 63} <= set(report["started"]) for report in engine.reports()), "they are sent")
    engine.all("done", 63)
    engine.all("failed", 62)
    reports = engine.done(62, 63)
    assert [outcome(reports, room).kind for room in (62, 63)] == ["failed", "succeeded"]
    assert "(from sglang-" in outcome(reports, 62).message  # the coordinator has decided


def test_a_warm_up_is_not_the_coordinators(engine: Engine) -> None:
    engine.say("fake 65")
    assert outcome(engine.done(65), 65).kind == "succeeded"


def test_what_leaves_the_queue_unseen_is_not_waited_for(engine: Engine) -> None:
    begin(engine, 66, 67)
    engine.say("vanish 66")
    engine.say("park 68")  # as many as before: the number alone does not tell
    engine.all("done", 67)
    assert outcome(engine.done(67), 67).kind == "succeeded"
    until(lambda: all(report["watched"] == [] for report in engine.reports()), "nothing is watched")
    engine.say("bootstrap 68")
    until(lambda: all(68 in report["started"] for report in engine.reports()), "it is sent")
    engine.all("done", 68)
    assert outcome(engine.done(68), 68).kind == "succeeded"


def test_rooms_are_used_again(engine: Engine) -> None:
    for end in ("done", "failed", "done"):
        before = engine.forget(71)
        assert before is None or before in {"succeeded", "failed"}
        begin(engine, 71)
        engine.all(end, 71)
        kind = outcome(engine.done(71), 71).kind
        assert kind == ("succeeded" if end == "done" else "failed")


def test_a_rank_that_is_slow_is_not_left_behind(engine: Engine) -> None:
    engine.all("count")
    engine.ask(1, "slow", 0.02)
    begin(engine, 81)
    ahead = 0
    for _ in range(6):
        wait(0.1)
        behind = engine.ask(1, "report")["step"]
        ahead = max(ahead, engine.ask(0, "report")["step"] - behind)
    assert ahead <= STEPS_APART
    engine.ask(1, "slow", 0.0)
    met = until(lambda: [report["calls"].get("barrier", 0) for report in engine.reports()], "calls")
    until(lambda: all(report["calls"].get("barrier", 0) > met[0] for report in engine.reports()), "they meet")
    engine.all("done", 81)
    assert outcome(engine.done(81), 81).kind == "succeeded"


# --- the wedge ----------------------------------------------------------------------------------


def test_what_decode_never_takes_is_retired_at_the_deadline(
    host: Host, coordinator: Coordinator, place: Path
) -> None:
    """Decode has gone after prefill, and a stuck transfer blocks SGLang's worker for all behind it."""
    with Engine(host, place, 2, coordinator.address) as engine:
        until(engine.is_on, "the coordinator decides")
        engine.all("stick", 0)
        begin(engine, 1, 2, 3)
        reports = engine.done(1, 2, 3, bound_s=DEADLINE_S + 10)
        for room in (1, 2, 3):
            end = outcome(reports, room)
            assert end.kind == "failed"
            said = r"deadline: waited [\d.]+ s after prefill for the engine's own transfer from"
            assert re.search(said, end.message)
        told = {(message[0], message[1]) for message in engine.told_decode(6)}
        assert told == {(str(room).encode(), b"0") for room in (1, 2, 3)}


def test_without_the_plugin_it_never_is(host: Host, place: Path) -> None:
    with Engine(host, place, 2) as engine:
        engine.all("stick", 0)
        engine.all("count")
        begin(engine, 1, 2, 3)
        wait(2 * DEADLINE_S)
        reports = engine.reports()
        assert [report["in_flight"] for report in reports] == [[1, 2, 3]] * 2
        assert [report["done"] for report in reports] == [{}, {}]
        # And all the while its ranks ask one another, in every step.
        assert all(report["calls"]["all_reduce"] > 100 for report in reports)


def test_pages_that_are_not_proven_quiet_are_held_and_an_operator_is_told(
    engine: Engine, coordinator: Coordinator
) -> None:
    until(coordinator.holds_nothing, "no other test has left anything behind")
    begin(engine, 91)  # and its transfer does not end
    told = "hold pages that their engine does not say to be quiet, the first of them room 91 of"
    until(
        lambda: any(told in reason for reason in coordinator.ask("/v1/status")["reasons"]),
        "it is not ready, and says why",
        DEADLINE_S + SETTLE_S + 10,
    )
    begin(engine, 92)
    engine.all("done", 92)
    reports = engine.done(92)
    assert outcome(reports, 92).kind == "succeeded"
    assert all(report["in_flight"] == [91] for report in reports)
    engine.ask(1, "failed", 91)  # it ends after all
    wait(0.3)
    assert all(report["in_flight"] == [91] for report in engine.reports())
    engine.ask(0, "done", 91)
    assert "deadline" in outcome(engine.done(91), 91).message
    until(coordinator.holds_nothing, "it is ready again")


def test_who_wants_a_bound_on_that_can_have_one(host: Host, place: Path) -> None:
    coordinator = Coordinator(place, unproven_s=2.0)
    try:
        with Engine(host, place, 2, coordinator.address) as engine:
            until(engine.is_on, "the coordinator decides")
            begin(engine, 1)
            assert "deadline" in outcome(engine.done(1), 1).message
            until(coordinator.holds_nothing, "it holds nothing")
    finally:
        coordinator.close()
