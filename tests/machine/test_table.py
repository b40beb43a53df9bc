"""Every (state, event) pair of the table: what it does, or that it is refused and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import pytest

from coordinator import events
from coordinator.errors import InvalidTransitionError
from coordinator.events import (
    INHERITED,
    Aborted,
    AllMoving,
    Conclude,
    Effect,
    Event,
    ExtendClock,
    Extended,
    Inherited,
    Late,
    Moved,
    MoveFailed,
    MoveQuiet,
    Offered,
    Opened,
    Paired,
    Refuse,
    Release,
    Revoke,
    Sent,
    StartClock,
    StartMove,
    State,
)
from coordinator.messages import Role
from coordinator.reasons import Failure, Reason
from coordinator.table import TABLE

from .support import (
    BROKEN,
    CANCELLED,
    PAIRS,
    failed,
    failed_quiet,
    feed,
    moving,
    open_,
    open_unpaired,
    packed,
    picture,
    succeeded,
    waiting,
    waiting_unpaired,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.machine import HandoffMachine

ALL_EVENTS: tuple[type[Event], ...] = get_args(Event)
BOTH = [Release(Role.PREFILL), Release(Role.DECODE)]
#: One event of each kind, as it may come at any time.
ANY_EVENT: tuple[Event, ...] = (
    Opened(1),
    Sent(1, packed(12, 13), last=True, aux=b"other"),
    Offered(1, packed(22, 23), 0),
    Extended(0),
    Paired(PAIRS),
    Inherited(),
    Moved(0),
    MoveFailed(0, CANCELLED, source_quiet=True, destination_quiet=True),
    MoveQuiet(0, Role.PREFILL),
    Aborted(CANCELLED),
)


class Row(NamedTuple):
    """In the state that ``build`` makes, ``event`` leads to ``after`` and has these ``effects``."""

    build: Callable[[], HandoffMachine]
    event: Event
    after: State
    effects: list[Effect]


def mismatch(sent: str, offered: str, rank: int = 0) -> Failure:
    message = f"room 7: prefill rank {rank} sent {sent}, decode rank {rank} offered {offered}"
    return Failure(Reason.REJECTED, "", message)


def failing(move: int, *, source: bool, destination: bool) -> MoveFailed:
    return MoveFailed(move, BROKEN, source_quiet=source, destination_quiet=destination)


OPEN_ROWS = [
    Row(open_, Opened(0), State.OPEN, []),
    Row(open_, Opened(1), State.OPEN, []),
    Row(open_, Sent(0, b"", last=False), State.OPEN, []),
    Row(open_, Sent(1, packed(12), last=False), State.OPEN, []),
    Row(
        open_,
        Sent(0, packed(11), last=False),
        State.OPEN,
        [StartMove(1, (0, 0), packed(11), packed(21))],
    ),
    Row(
        open_,
        Sent(0, packed(11), last=True),
        State.WAITING,
        [StartClock(), StartMove(1, (0, 0), packed(11), packed(21))],
    ),
    Row(open_, Sent(1, packed(12), last=True), State.WAITING, [StartClock()]),
    Row(open_unpaired, Sent(0, packed(11), last=True), State.WAITING, [StartClock()]),
    Row(
        open_,
        Sent(0, packed(11, 12), last=False),
        State.FAILED,
        [Conclude(mismatch("3 pages so far", "2 behind a prefix of 0")), Revoke((0,))],
    ),
    Row(open_, Offered(1, packed(22, 23), 0), State.OPEN, []),
    Row(open_, Offered(0, packed(24, 25), 0), State.OPEN, [Refuse("offered twice")]),
    Row(open_, Extended(0), State.OPEN, []),
    Row(open_unpaired, Paired(PAIRS), State.OPEN, [StartMove(0, (0, 0), packed(10), packed(20))]),
    Row(open_, Inherited(), State.OPEN, []),
    Row(open_, Moved(0), State.OPEN, []),
    Row(open_, Moved(9), State.OPEN, [Late(Moved(9))]),
    Row(
        open_,
        failing(0, source=False, destination=False),
        State.FAILED,
        [Conclude(BROKEN), Revoke((0,))],
    ),
    Row(open_, failing(0, source=True, destination=True), State.FAILED, [Conclude(BROKEN), *BOTH]),
    Row(
        open_,
        failing(0, source=True, destination=False),
        State.FAILED,
        [Conclude(BROKEN), Revoke((0,)), Release(Role.PREFILL)],
    ),
    Row(
        open_,
        failing(9, source=False, destination=False),
        State.OPEN,
        [Late(failing(9, source=False, destination=False))],
    ),
    Row(open_, Aborted(CANCELLED), State.FAILED, [Conclude(CANCELLED), Revoke((0,))]),
    Row(open_unpaired, Aborted(CANCELLED), State.FAILED, [Conclude(CANCELLED), *BOTH]),
]

WAITING_ROWS = [
    Row(waiting, Opened(0), State.WAITING, [Refuse("opened after its last chunk")]),
    Row(waiting, Opened(1), State.WAITING, []),
    Row(waiting, Sent(0, b"", last=False), State.WAITING, [Refuse("sent again after its last chunk")]),
    Row(waiting, Sent(0, b"", last=True), State.WAITING, [Refuse("sent again after its last chunk")]),
    Row(waiting, Sent(1, packed(12, 13), last=True), State.WAITING, []),
    Row(waiting, Offered(0, packed(20, 21), 0), State.WAITING, [Refuse("offered twice")]),
    Row(waiting, Offered(1, packed(22, 23), 0), State.WAITING, []),
    Row(waiting, Extended(1), State.WAITING, [ExtendClock()]),
    Row(
        waiting_unpaired,
        Paired(PAIRS),
        State.WAITING,
        [StartMove(0, (0, 0), packed(10, 11), packed(20, 21))],
    ),
    Row(waiting, Moved(1), State.WAITING, []),
    Row(waiting, Moved(2), State.WAITING, [Late(Moved(2))]),
    Row(
        waiting,
        failing(1, source=False, destination=True),
        State.FAILED,
        [Conclude(BROKEN), Revoke((0, 1))],
    ),
    Row(
        waiting,
        failing(1, source=True, destination=True),
        State.FAILED,
        [Conclude(BROKEN), Revoke((0,))],
    ),
    Row(waiting, Aborted(CANCELLED), State.FAILED, [Conclude(CANCELLED), Revoke((0, 1))]),
    Row(waiting_unpaired, Aborted(CANCELLED), State.FAILED, [Conclude(CANCELLED), *BOTH]),
]

MOVING_ROWS = [
    Row(moving, Opened(1), State.MOVING, [Refuse("opened after its last chunk")]),
    Row(moving, Sent(1, packed(14), last=True), State.MOVING, [Refuse("sent again after its last chunk")]),
    Row(moving, Offered(1, packed(24, 25), 0), State.MOVING, [Refuse("offered twice")]),
    Row(moving, Extended(0), State.MOVING, [ExtendClock()]),
    Row(moving, Moved(2), State.MOVING, []),
    Row(moving, Moved(3), State.MOVING, [Late(Moved(3))]),
    Row(
        moving,
        failing(2, source=False, destination=False),
        State.FAILED,
        [Conclude(BROKEN), Revoke((0, 1, 2))],
    ),
    Row(moving, Aborted(CANCELLED), State.FAILED, [Conclude(CANCELLED), Revoke((0, 1, 2))]),
]

SUCCEEDED_ROWS = [Row(succeeded, event, State.SUCCEEDED, [Late(event)]) for event in ANY_EVENT]

FAILED_ROWS = [
    *(Row(failed_quiet, event, State.FAILED, [Late(event)]) for event in ANY_EVENT[:8]),
    Row(failed_quiet, MoveQuiet(0, Role.PREFILL), State.FAILED, []),
    Row(failed_quiet, Aborted(BROKEN), State.FAILED, [Late(Aborted(BROKEN))]),
    Row(failed, Moved(1), State.FAILED, [Late(Moved(1))]),
    Row(
        failed,
        failing(1, source=True, destination=True),
        State.FAILED,
        [Late(failing(1, source=True, destination=True))],
    ),
    Row(failed, MoveQuiet(0, Role.PREFILL), State.FAILED, []),
    Row(failed, MoveQuiet(0, Role.DECODE), State.FAILED, []),
    Row(failed, Aborted(CANCELLED), State.FAILED, [Late(Aborted(CANCELLED))]),
]

ROWS = [*OPEN_ROWS, *WAITING_ROWS, *MOVING_ROWS, *SUCCEEDED_ROWS, *FAILED_ROWS]

#: What no caller may do: these pairs stand nowhere in the table.
FORBIDDEN: list[tuple[Callable[[], HandoffMachine], Event]] = [
    (open_, MoveQuiet(0, Role.DECODE)),
    (waiting, MoveQuiet(0, Role.DECODE)),
    (moving, MoveQuiet(0, Role.DECODE)),
    (moving, Paired(PAIRS)),
    (waiting, Inherited()),
    (moving, Inherited()),
]


def name(case: tuple[Any, ...]) -> str:
    return f"{case[0].__name__}-{type(case[1]).__name__}"


def pair(build: Callable[[], HandoffMachine], event: Event) -> tuple[State, type[Event]]:
    return build().state, type(event)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_row_does_what_it_says(row: Row) -> None:
    machine = row.build()
    assert feed(machine, row.event) == row.effects
    assert machine.state is row.after


@pytest.mark.parametrize(("build", "event"), FORBIDDEN, ids=[name(case) for case in FORBIDDEN])
def test_a_pair_without_a_row_is_an_error_and_changes_nothing(
    build: Callable[[], HandoffMachine], event: Event
) -> None:
    machine = build()
    before = picture(machine)
    with pytest.raises(InvalidTransitionError) as caught:
        machine.apply(event)
    assert picture(machine) == before
    machine.validate()
    text = str(caught.value)
    assert "room 7 attempt 3" in text
    assert repr(event) in text
    assert f"in state {machine.state}" in text
    assert str(machine.story) in text


@pytest.mark.parametrize("build", [open_, waiting], ids=["open", "waiting"])
def test_a_second_pairing_is_an_error_and_changes_nothing(build: Callable[[], HandoffMachine]) -> None:
    machine = build()
    before = picture(machine)
    with pytest.raises(InvalidTransitionError, match="room 7 attempt 3 is paired already"):
        machine.apply(Paired(PAIRS))
    assert picture(machine) == before


@pytest.mark.parametrize("event", ANY_EVENT, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("build", [succeeded, failed_quiet])
def test_after_the_end_nothing_changes(build: Callable[[], HandoffMachine], event: Event) -> None:
    machine = build()
    before = picture(machine)
    feed(machine, event, event)
    assert picture(machine) == before


def test_every_pair_is_tested_here() -> None:
    """A state, an event or a row that is added without a test of it fails this."""
    every = {(state, event) for state in State for event in ALL_EVENTS}
    present = {(state, event) for state, row in TABLE.items() for event in row}
    assert len(every) == 50
    assert {pair(row.build, row.event) for row in ROWS} == present
    assert {pair(build, event) for build, event in FORBIDDEN} == every - present


def test_terminal_rows_are_explicit() -> None:
    for state in State:
        if state.terminal:
            assert set(TABLE[state]) == set(ALL_EVENTS), state


def test_every_state_is_the_one_that_its_builder_names() -> None:
    named = [open_, open_unpaired, waiting, waiting_unpaired, moving, succeeded, failed, failed_quiet]
    states = [build().state.value for build in named]
    assert states == ["open", "open", "waiting", "waiting", "moving", "succeeded", "failed", "failed"]


def test_every_event_and_effect_is_in_its_union() -> None:
    structs = {thing for thing in vars(events).values() if isinstance(thing, type)}
    told = {*get_args(Event), *get_args(Effect), events.Pairing, events.State}
    assert {thing for thing in structs if thing.__module__ == events.__name__} == told


def test_entering_moving_is_told_once() -> None:
    machine = waiting()
    assert feed(machine, Offered(1, packed(22, 23), 0)) == []
    effects = feed(machine, Sent(1, packed(12, 13), last=True))
    assert effects == [StartMove(2, (1, 1), packed(12, 13), packed(22, 23)), AllMoving()]
    assert machine.state is State.MOVING


def test_the_last_move_ends_it_with_both_sides_released_at_once() -> None:
    machine = moving()
    assert feed(machine, Moved(2), Moved(0)) == []
    assert feed(machine, Moved(1)) == [Conclude(None), *BOTH]
    assert machine.state is State.SUCCEEDED


def test_what_a_former_coordinator_left_holds_both_sides_until_it_is_quiet() -> None:
    machine = open_unpaired()
    feed(machine, Inherited())
    assert feed(machine, Aborted(CANCELLED)) == [Conclude(CANCELLED), Revoke((INHERITED,))]
    assert machine.held == (Role.PREFILL, Role.DECODE)
    assert feed(machine, MoveQuiet(INHERITED, Role.DECODE)) == [Release(Role.DECODE)]
    assert feed(machine, MoveQuiet(INHERITED, Role.PREFILL)) == [Release(Role.PREFILL)]
