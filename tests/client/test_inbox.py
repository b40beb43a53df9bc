"""The inbox: lost, doubled, shuffled arrivals, and always the same sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.client.inbox import Head, Inbox
from coordinator.errors import ProtocolError
from coordinator.messages import Event, Outcome, Released


def event(number: int) -> Event:
    return Outcome(number, 1) if number % 2 else Released(number, 1)


def events(first: int, last: int) -> list[Event]:
    return [event(number) for number in range(first, last + 1)]


def take(inbox: Inbox, first: int, last: int, stable: int = 0) -> bool:
    """Take the events first..last; whether all of them are there now."""
    inbox.take(first, events(first, last), stable)
    return inbox.have >= last


def joined(epoch: int = 5, first: int = 1, bound: int = 1000) -> Inbox:
    inbox = Inbox(bound)
    inbox.enter(epoch, first)
    return inbox


def test_events_are_taken_in_order_and_once() -> None:
    inbox = joined()
    assert inbox.take(1, events(1, 3), 0) == events(1, 3)
    assert inbox.take(2, events(2, 4), 0) == events(4, 4)
    assert not inbox.take(1, events(1, 2), 0)
    assert inbox.drain() == events(1, 4)
    assert inbox.drain() == []
    assert inbox.have == inbox.drained == 4


def test_nothing_behind_a_gap_is_taken() -> None:
    inbox = joined()
    assert not take(inbox, 2, 3)
    assert inbox.have == 0
    assert take(inbox, 1, 3)
    assert inbox.drain() == events(1, 3)


def test_who_joins_late_begins_where_it_is_told() -> None:
    inbox = joined(first=11)
    assert inbox.base == inbox.drained == 10
    assert take(inbox, 11, 12)
    assert inbox.drain() == events(11, 12)


def test_numbers_go_on_in_a_new_epoch() -> None:
    inbox = joined(epoch=5)
    take(inbox, 1, 3)
    inbox.drain_through(Head(5, 2))
    inbox.enter(6, 4)
    assert inbox.is_past(5)
    assert not inbox.is_past(6)
    assert inbox.drained == 2
    take(inbox, 3, 5)
    assert inbox.drain_through(Head(6, 4)) == events(3, 4)
    assert inbox.drain() == events(5, 5)


def test_no_more_is_taken_than_the_bound() -> None:
    inbox = joined(bound=3)
    assert not take(inbox, 1, 5)
    assert inbox.full
    assert inbox.have == 3
    assert inbox.drain() == events(1, 3)
    assert take(inbox, 4, 5)


def test_the_head_is_what_all_ranks_have_once_all_know_the_epoch() -> None:
    inbox = joined(epoch=5)
    take(inbox, 1, 3, stable=2)
    assert Head.unpack(inbox.token) == (0, 0), "not all ranks know epoch 5"
    inbox.group_ready()
    assert Head.unpack(inbox.token) == (5, 2)
    inbox.take(4, [], 3)
    assert Head.unpack(inbox.token) == (5, 3)
    inbox.take(4, [], 1)
    assert Head.unpack(inbox.token) == (5, 3), "it never goes back"
    inbox.take(4, [], 9)
    assert Head.unpack(inbox.token) == (5, 3), "it never names what this rank lacks"
    inbox.enter(6, 4)
    assert Head.unpack(inbox.token) == (5, 3)
    inbox.take(4, [], 3)
    assert Head.unpack(inbox.token) == (5, 3), "not all ranks know epoch 6"
    inbox.group_ready()
    assert Head.unpack(inbox.token) == (6, 3)


def test_what_a_token_reaches() -> None:
    inbox = joined(epoch=5)
    take(inbox, 1, 3)
    assert inbox.reaches(Head(5, 3))
    assert not inbox.reaches(Head(5, 4))
    assert not inbox.reaches(Head(6, 3)), "never heard of"
    assert inbox.reaches(Head(0, 0))
    inbox.enter(6, 4)
    assert inbox.reaches(Head(5, 3))
    assert inbox.reaches(Head(6, 3))
    assert not inbox.reaches(Head(5, 4))


def test_only_so_many_epochs_are_remembered() -> None:
    inbox = joined(epoch=1)
    for epoch in range(2, 300):
        inbox.enter(epoch, 1)
    assert inbox.is_past(298)
    assert not inbox.is_past(1)
    assert len(inbox._past) == 256


def test_an_old_token_drains_nothing_and_takes_nothing_back() -> None:
    inbox = joined()
    take(inbox, 1, 4)
    inbox.drain_through(Head(5, 3))
    assert inbox.drain_through(Head(5, 1)) == []
    assert inbox.drained == 3
    assert inbox.drain() == events(4, 4)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_tokens_come_back_as_they_went(epoch: int, number: int) -> None:
    token = Head(epoch, number).pack()
    assert len(token) == 17
    assert Head.unpack(token) == (epoch, number)


@given(st.binary(max_size=40).filter(lambda token: len(token) != 17))
def test_other_bytes_are_no_token(token: bytes) -> None:
    with pytest.raises(ProtocolError):
        Head.unpack(token)


@given(st.data(), st.integers(0, 40), st.integers(1, 50))
def test_any_arrival_gives_the_same_sequence(data: st.DataObject, last: int, bound: int) -> None:
    """Case C30: shuffled, doubled, lost; and a replay now and then. Same sequence, same heads."""
    inbox = joined(bound=bound)
    ranges = st.tuples(st.integers(1, last + 1), st.integers(0, last), st.integers(0, last))
    drained: list[Event] = []
    heads = [Head(5, 0)]
    inbox.group_ready()
    for first, end, stable in data.draw(st.lists(ranges, max_size=40)):
        inbox.take(first, events(first, end), stable)
        heads.append(Head.unpack(inbox.token))
        match data.draw(st.sampled_from(["drain", "head", "wait"])):
            case "drain":
                drained += inbox.drain()
            case "head":
                drained += inbox.drain_through(heads[-1])
                assert len(drained) >= heads[-1].number
    assert heads == sorted(heads)
    while inbox.have < last:
        inbox.take(inbox.have + 1, events(inbox.have + 1, last), 0)
        drained += inbox.drain()
    drained += inbox.drain()
    assert drained == events(1, last)
