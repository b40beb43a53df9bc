"""What a rank remembers: its last events, rooms in flight, pages that were not released."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.client import recollection
from coordinator.client.recollection import Recollection
from coordinator.messages import (
    MAX_FRAME_BYTES,
    MAX_REMEMBERED,
    Cancel,
    Event,
    Extend,
    Held,
    Item,
    LegDone,
    LegFailed,
    LegQuiet,
    Offer,
    Open,
    Outcome,
    Released,
    Send,
    SideData,
    Unreleased,
    encode,
)
from coordinator.reasons import Failure, Reason

if TYPE_CHECKING:
    import pytest


def said(*items: Item, submitted: bool = True) -> Recollection:
    memory = Recollection()
    for item in items:
        memory.spoke(item)
    if submitted:
        memory.submitted(items)
    return memory


def send(room: int, after: int = 0) -> Send:
    return Send(room, after, b"", last=True)


def test_rooms_that_were_heard_of_are_held_until_their_verdict() -> None:
    memory = said(Open(1, 0), send(2), Offer(3, 0, b""))
    assert memory.report(0).held == [Held(1, 0, 0), Held(2, 0, 0), Held(3, 0, 0)]
    memory.heard(1, [Outcome(2, 1)])
    assert memory.report(0).held == [Held(1, 0, 0), Held(3, 0, 0)]


def test_what_nobody_has_heard_of_is_not_held() -> None:
    report = said(Open(1, 0), submitted=False).report(0)
    assert (report.held, report.said) == ([], [Held(1, 0, 0)])


def test_nothing_is_begun_by_extending_or_cancelling() -> None:
    assert said(Extend(1, 0), Cancel(1, 0)).report(0).held == []


def test_a_room_that_is_used_again_is_held_as_its_next_attempt() -> None:
    memory = said(Open(1, 0))
    memory.heard(1, [Outcome(1, 1), Released(1, 1)])
    second = send(1, after=2)
    memory.spoke(second)
    # Only now is it confirmed what was said of the first attempt.
    memory.submitted([Open(1, 0)])
    assert memory.report(0).held == []
    memory.submitted([second])
    assert memory.report(0).held == [Held(1, 2, 1)]


def test_what_is_said_too_late_begins_nothing() -> None:
    memory = said(Open(1, 0))
    memory.heard(1, [Outcome(1, 1)])
    late = send(1, after=0)
    memory.spoke(late)
    memory.submitted([late])
    assert memory.report(0).held == []


def test_who_joined_late_speaks_as_of_then() -> None:
    assert said(Open(1, 0)).report(7).held == [Held(1, 7, 0)]


def test_attempts_with_a_verdict_are_unreleased_until_told() -> None:
    memory = said(send(1), send(2))
    memory.heard(1, [Outcome(1, 1), Outcome(2, 4), Released(1, 1)])
    assert memory.report(0).unreleased == [Unreleased(2, 4)]
    memory.heard(4, [Released(2, 4)])
    assert memory.report(0).unreleased == []


FAILED = Failure(Reason.TRANSPORT, "p/0", "the link broke")


def quiet(memory: Recollection) -> list[bool]:
    return [left.quiet for left in memory.report(0).unreleased]


def test_it_is_remembered_that_this_rank_s_own_engine_reads_the_pages_no_more() -> None:
    for ended in (LegDone(1, 0), LegFailed(1, 0, "", quiet=True)):
        memory = said(send(1), ended)
        memory.heard(1, [Outcome(1, 1, FAILED)])
        assert quiet(memory) == [True]
    memory = said(send(1), LegFailed(1, 0, "", quiet=False))
    memory.heard(1, [Outcome(1, 1, FAILED)])
    assert quiet(memory) == [False]
    memory.spoke(LegQuiet(1, 1, 1))
    assert quiet(memory) == [True]


def test_that_one_attempt_is_quiet_says_nothing_about_another() -> None:
    for first in (1, 2):
        memory = said(send(1))
        memory.heard(1, [Outcome(1, 1, FAILED)])
        memory.spoke(send(1, after=1))
        memory.heard(2, [Outcome(1, 2, FAILED)])
        memory.spoke(LegQuiet(1, 2, first))
        assert quiet(memory) == [first == 1, first == 2]
        memory.spoke(LegQuiet(1, 2, 3 - first))
        assert quiet(memory) == [True, True]


def test_that_a_former_attempt_is_quiet_says_nothing_about_the_one_in_flight() -> None:
    memory = said(send(1))
    memory.heard(1, [Outcome(1, 1, FAILED)])
    memory.spoke(send(1, after=1))
    memory.spoke(LegQuiet(1, 1, 1))
    memory.heard(2, [Outcome(1, 2, FAILED)])
    assert quiet(memory) == [True, False]


def test_the_last_events_are_kept_within_bounds() -> None:
    memory = Recollection()
    events: list[Event] = [Outcome(room, 1) for room in range(1, 3000)]
    memory.heard(1, events)
    assert memory.report(0).events == events[-MAX_REMEMBERED:]
    large: list[Event] = [Outcome(room, 1, aux=bytes(1 << 20)) for room in range(1, 9)]
    memory.heard(3000, large)
    assert memory.report(0).events == large[-2:]
    assert len(encode(memory.report(0))) < MAX_FRAME_BYTES


def test_ended_rooms_are_forgotten_at_last() -> None:
    memory = Recollection()
    memory.heard(1, [Outcome(room, 1) for room in range(1, 40_000)])
    assert len(memory._ended) == 16384
    memory.heard(40_000, [Released(room, 1) for room in range(1, 40_000)])
    assert memory.report(0).unreleased == []


def test_of_the_ended_rooms_the_one_that_ended_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recollection, "_MAX_ENDED", 2)
    memory = Recollection()
    memory.heard(1, [Outcome(1, 1), Outcome(2, 1), Outcome(1, 2), Outcome(3, 1)])
    again = [Open(room, 4) for room in (1, 2, 3)]
    for item in again:
        memory.spoke(item)
    memory.submitted(again)
    assert memory.report(0).held == [Held(1, 4, 2), Held(2, 4, 0), Held(3, 4, 1)]


def test_side_data_of_successes_are_kept_for_decode_may_not_have_got_them() -> None:
    memory = said(Send(1, 0, b"", last=False), Send(1, 0, b"", last=True, aux=b"one"), send(2), Open(3, 0))
    memory.heard(1, [Outcome(1, 1), Released(1, 1), Outcome(2, 1), Outcome(3, 1)])
    assert memory.report(0).sent == [SideData(1, 1, b"one"), SideData(2, 1, b"")]
    memory.spoke(Send(1, 4, b"", last=True, aux=b"again"))
    memory.heard(5, [Outcome(1, 2)])
    assert memory.report(0).sent[-1] == SideData(1, 2, b"again")


def test_side_data_count_once_of_a_room_that_is_said_to_end_twice() -> None:
    """The second one is refused: the first was the last."""
    memory = said(Send(1, 0, b"", last=True, aux=b"one"), Send(1, 0, b"", last=True, aux=b"other"))
    assert memory.report(0).sent == [SideData(1, 0, b"one", 0)]
    memory.heard(1, [Outcome(1, 1)])
    assert memory.report(0).sent == [SideData(1, 1, b"one")]
    assert memory._sending_bytes == 0


def test_side_data_of_failures_are_forgotten() -> None:
    memory = said(Send(1, 0, b"", last=True, aux=b"one"))
    memory.heard(1, [Outcome(1, 1, Failure(Reason.STALLED, "", "stood still"))])
    assert memory.report(0).sent == []


def test_side_data_are_bounded() -> None:
    memory = Recollection()
    large = b"x" * (1 << 20)
    for room in range(1, 101):
        memory.spoke(Send(room, 0, b"", last=True, aux=large))
    assert memory._sending_bytes == 16 << 20
    memory.heard(1, [Outcome(room, 1) for room in range(1, 101)])
    assert [sent.room for sent in memory.report(0).sent] == [15, 16]
    assert memory._sending_bytes == 0
    for room in range(101, 2001):
        memory.spoke(send(room, after=100))
    memory.heard(101, [Outcome(room, 1) for room in range(101, 2001)])
    assert len(memory.report(0).sent) == MAX_REMEMBERED
    assert memory._sent_bytes == 0
