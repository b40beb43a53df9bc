"""A group's log, against a list that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.broadcast import GroupLog
from coordinator.messages import Event, Outcome, Released

EVENTS: list[Event] = [Outcome(7, 1), Released(7, 1), Outcome(8, 2)]

#: Append an event (by its index), or trim through a number.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2)),
        st.tuples(st.just("trim"), st.integers(-2, 40)),
    ),
    max_size=60,
)


@given(STEPS)
def test_it_is_a_numbered_list_whose_beginning_was_dropped(steps: list[tuple[str, int]]) -> None:
    log = GroupLog()
    everything: list[Event] = []
    dropped = 0
    for step, argument in steps:
        if step == "append":
            everything.append(EVENTS[argument])
            assert log.append(EVENTS[argument]) == len(everything)
        else:
            log.trim(argument)
            dropped = max(dropped, min(argument, len(everything)))
        assert log.head == len(everything)
        assert log.first == dropped + 1
        assert len(log) == len(everything) - dropped
        for number in range(-1, len(everything) + 3):
            kept_after = max(number, dropped)
            assert log.since(number) == everything[kept_after:]


def test_it_starts_empty_at_number_0() -> None:
    log = GroupLog()
    assert (log.head, log.first, len(log), log.since(0)) == (0, 1, 0, [])


def test_trimming_all_keeps_the_head() -> None:
    log = GroupLog()
    for event in EVENTS:
        log.append(event)
    log.trim(3)
    assert (log.head, log.first, len(log)) == (3, 4, 0)
    assert log.append(EVENTS[0]) == 4
    assert log.since(3) == [EVENTS[0]]
