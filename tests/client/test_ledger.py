"""What an engine waits for: rooms in flight, attempts, pages; and what a loss makes of it."""

from __future__ import annotations

import pytest

from coordinator.client.ledger import Ledger
from coordinator.messages import Cancel, Extend, Item, Offer, Open, Outcome, Released, Send
from coordinator.reasons import Failure, Reason

LOST = Failure(Reason.COORDINATOR_LOST, "", "gone")


def ledger(*items: Item) -> Ledger:
    made = Ledger()
    for item in items:
        made.spoke(item)
    return made


def failed(*attempts: tuple[int, int]) -> list[Outcome]:
    return [Outcome(room, attempt, LOST) for room, attempt in attempts]


def test_rooms_in_flight_fail_in_ascending_order() -> None:
    book = ledger(Open(9, 0), Send(3, 0, b"", last=False), Offer(7, 0, b""))
    book.hand_over(1, [Outcome(7, 1)])
    assert book.give_up(LOST) == failed((3, 1), (9, 1))
    assert book.given_up == {3, 9}
    assert book.give_up(LOST) == []


def test_what_begins_nothing_is_not_in_flight() -> None:
    assert ledger(Extend(1, 0), Cancel(2, 0)).give_up(LOST) == []


def test_what_was_said_before_the_verdict_was_drained_is_late() -> None:
    book = ledger(Open(1, 0))
    book.hand_over(1, [Outcome(1, 1)])
    book.spoke(Send(1, 0, b"", last=True))
    assert book.give_up(LOST) == []
    book = ledger(Open(1, 0))
    book.hand_over(1, [Outcome(1, 1)])
    book.spoke(Send(1, 1, b"", last=True))
    assert book.give_up(LOST) == failed((1, 2))


def test_a_verdict_of_a_former_life_makes_nothing_late() -> None:
    book = ledger(Open(1, 0), Open(2, 0))
    book.hand_over(500, [Outcome(1, 1)])
    book.give_up(LOST)
    # Numbers begin anew.
    book.spoke(Open(1, 3))
    book.spoke(Open(2, 0))
    assert book.give_up(LOST) == failed((1, 2), (2, 2))


def test_attempts_of_the_next_coordinator_do_not_meet_those_of_the_former_one() -> None:
    """A room is used again while its former pages are still held; the new coordinator counts from 1."""
    book = ledger(Open(1, 0), Open(2, 0))
    assert book.hand_over(1, [Outcome(2, 3)]) == [Outcome(2, 3)]
    assert book.give_up(LOST) == failed((1, 1))
    book.spoke(Open(1, 0))
    events = book.hand_over(1, [Outcome(1, 1), Outcome(4, 1), Released(1, 1)])
    assert events == [Outcome(1, 4), Outcome(4, 4), Released(1, 4)]
    assert book.former == 2
    assert book.release() == [Released(1, 1), Released(2, 3)]
    assert book.former == 0
    book.spoke(Open(1, 3))
    book.spoke(Open(5, 3))
    assert book.give_up(LOST) == failed((1, 5), (5, 4)), "as a coordinator would have counted"


def test_what_is_released_already_is_not_released_again() -> None:
    book = ledger(Open(1, 0), Open(2, 0))
    book.hand_over(1, [Outcome(1, 1), Released(1, 1), Outcome(2, 1)])
    assert book.give_up(LOST) == []
    assert book.release() == [Released(2, 1)]
    assert book.release() == []


def test_an_attempt_is_never_given_twice_however_long_ago_its_room_ended() -> None:
    book = ledger()
    book.hand_over(1, [Outcome(1, 1)])
    number = 2
    for room in range(2, 16_400):
        book.hand_over(number, [Outcome(room, 1), Released(room, 1)])
        number += 2
    # Room 1 is forgotten, its pages are not.
    assert len(book._ended) == 16_384
    assert (1 in book._ended, 16_399 in book._ended) == (False, True)
    book.spoke(Open(1, number))
    assert book.give_up(LOST) == failed((1, 2))


def test_rooms_that_were_given_up_are_forgotten_at_last() -> None:
    book = ledger(*(Open(room, 0) for room in range(1, 20_001)))
    assert len(book.give_up(LOST)) == 20_000
    assert len(book._ended) == 16_384
    assert (1 in book._ended, 20_000 in book._ended) == (False, True)


@pytest.mark.parametrize("losses", [1, 3])
def test_pages_are_held_over_several_losses(losses: int) -> None:
    book = ledger()
    for _ in range(losses):
        book.spoke(Open(1, 0))
        book.give_up(LOST)
    assert book.release() == [Released(1, attempt) for attempt in range(1, losses + 1)]
