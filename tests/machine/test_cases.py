"""What went wrong for others, at the level of one handoff's state machine."""

from __future__ import annotations

import itertools

import pytest

from coordinator.events import (
    Aborted,
    Conclude,
    Event,
    Extended,
    Late,
    Moved,
    MoveFailed,
    MoveQuiet,
    Offered,
    Opened,
    Paired,
    Pairing,
    Refuse,
    Release,
    Revoke,
    Sent,
    StartClock,
    StartMove,
    State,
)
from coordinator.machine import HandoffMachine
from coordinator.messages import Role
from coordinator.reasons import Failure, Reason

from .support import (
    AUX,
    BROKEN,
    CANCELLED,
    PAIRS,
    failed,
    feed,
    machine_after,
    moving,
    open_,
    packed,
    picture,
    succeeded,
    unpacked,
    waiting,
)

BOTH = [Release(Role.PREFILL), Release(Role.DECODE)]
FOUR_TO_ONE = Pairing.of(4, 1, ((0, 0), (1, 0), (2, 0), (3, 0)))
TOO_MANY = "prefill rank 0 sent 4 pages so far, decode rank 0 offered 2 behind a prefix of 0"
ONE_TO_ONE = Pairing.of(1, 1, ((0, 0),))


def releases(*events: Event, machine: HandoffMachine) -> list[Role]:
    return [effect.side for effect in feed(machine, *events) if isinstance(effect, Release)]


# --- one verdict, with its cause ---------------------------------------------------------------


def test_the_first_failure_wins_and_its_cause_is_kept() -> None:
    """Case C31: one of 8 ranks fails; what follows from it does not hide the cause."""
    eight = Pairing.of(8, 8, tuple((rank, rank) for rank in range(8)))
    machine = machine_after(Paired(eight), *(Offered(rank, packed(rank), 0) for rank in range(8)))
    feed(machine, *(Sent(rank, packed(rank), last=True) for rank in range(7)))
    cause = Failure(Reason.CANCELLED_BY_PREFILL, "prefill-0/7", "CUDA error: an illegal memory access")
    effects = feed(machine, Aborted(cause))
    assert effects == [Conclude(cause), Revoke(tuple(range(7)))]
    consequences: list[Event] = [
        Aborted(Failure(Reason.RANK_LOST, "prefill-0/7", "gone")),
        MoveFailed(3, BROKEN, source_quiet=True, destination_quiet=True),
        Aborted(Failure(Reason.DEADLINE, "", "too late")),
    ]
    later = feed(machine, *consequences)
    assert [effect.event for effect in later if isinstance(effect, Late)] == consequences
    assert not any(isinstance(effect, Conclude) for effect in later)
    assert machine.failure is cause


def test_success_reported_after_failed_changes_nothing() -> None:
    """Case C37: it stays Failed, and the late success is told as late, each time."""
    machine = failed()
    for move in (0, 1, 2):
        effects = feed(machine, Moved(move))
        assert effects[0] == Late(Moved(move))
        assert not any(isinstance(effect, Conclude) for effect in effects)
    assert machine.state is State.FAILED
    assert machine.failure is BROKEN
    assert machine.concluded == 1


def test_failure_reported_after_success_changes_nothing() -> None:
    """Case C37, the other way round."""
    machine = succeeded()
    before = picture(machine)
    late: list[Event] = [
        Aborted(CANCELLED),
        MoveFailed(0, BROKEN, source_quiet=False, destination_quiet=False),
    ]
    assert feed(machine, *late) == [Late(event) for event in late]
    assert picture(machine) == before


def test_completions_of_one_leg_do_not_count_for_another() -> None:
    """Case C34: four prefill ranks to one decode rank; the same completion four times is one."""
    machine = machine_after(Paired(FOUR_TO_ONE), Offered(0, packed(20), 0))
    started = feed(machine, *(Sent(rank, packed(10 + rank), last=True) for rank in range(4)))
    legs = [effect.leg for effect in started if isinstance(effect, StartMove)]
    assert legs == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert machine.state is State.MOVING
    assert feed(machine, Moved(0), Moved(0), Moved(0), Moved(0)) == [Late(Moved(0))] * 3
    assert machine.state is State.MOVING
    assert feed(machine, Moved(2), Moved(1)) == []
    assert feed(machine, Moved(3)) == [Conclude(None), *BOTH]


def test_a_chunk_done_twice_is_not_two_chunks() -> None:
    """Case C34: the same with the chunks of one leg."""
    machine = waiting()
    feed(machine, Offered(1, b"", 2), Sent(1, packed(12, 13), last=True))
    assert machine.unsettled == (0, 1)
    assert feed(machine, Moved(1), Moved(1)) == [Late(Moved(1))]
    assert feed(machine, Moved(0)) == [Conclude(None), *BOTH]


@pytest.mark.parametrize("last", [True, False])
def test_a_second_send_after_the_last_is_refused(*, last: bool) -> None:
    """Case C35: the newcomer is refused; the handoff that it would have spoiled goes on to its end."""
    machine = waiting()
    before = picture(machine)
    refused = feed(machine, Sent(0, packed(90, 91), last=last, aux=b"of another request"))
    assert refused == [Refuse("sent again after its last chunk")]
    assert feed(machine, Opened(0)) == [Refuse("opened after its last chunk")]
    assert picture(machine) == before
    feed(machine, Offered(1, packed(22, 23), 0), Sent(1, packed(12, 13), last=True))
    feed(machine, Moved(0), Moved(1), Moved(2))
    assert machine.state is State.SUCCEEDED
    assert machine.aux == AUX


def test_a_second_offer_is_refused() -> None:
    """Case C35 on the decode side: the pages of the first offer stay."""
    machine = open_()
    assert feed(machine, Offered(0, packed(90, 91), 0)) == [Refuse("offered twice")]
    (move,) = feed(machine, Sent(0, packed(11), last=False))
    assert isinstance(move, StartMove)
    assert unpacked(move.destination_pages) == (21,)


# --- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_prefix_that_is_the_whole_room_succeeds_without_a_move(order: tuple[int, ...]) -> None:
    """Case C48: decode has every page; nothing moves, and both sides are released at once."""
    events: list[Event] = [
        Sent(0, packed(10, 11, 12), last=True, aux=AUX),
        Offered(0, b"", 3),
        Paired(ONE_TO_ONE),
    ]
    effects = feed(machine := HandoffMachine(7, 1), *(events[index] for index in order))
    assert effects == [StartClock(), Conclude(None), *BOTH]
    assert machine.state is State.SUCCEEDED
    assert machine.aux == AUX


def test_a_prefix_of_some_ranks_only() -> None:
    """Case C48: rank 0 has all of it, rank 1 a page less: only that page moves."""
    machine = machine_after(Paired(PAIRS), Offered(0, b"", 2), Offered(1, packed(21), 1))
    effects = feed(machine, *(Sent(rank, packed(10, 11), last=True) for rank in (0, 1)))
    assert [effect for effect in effects if isinstance(effect, StartMove)] == [
        StartMove(0, (1, 1), packed(11), packed(21))
    ]
    feed(machine, Moved(0))
    assert machine.state is State.SUCCEEDED


@pytest.mark.parametrize("prefix", range(6))
@pytest.mark.parametrize("chunks", [(5,), (1, 1, 1, 1, 1), (2, 3), (0, 4, 1), (3, 2, 0)], ids=str)
@pytest.mark.parametrize("offer_at", ["before", "in the middle", "after"])
def test_each_page_goes_to_its_place(prefix: int, chunks: tuple[int, ...], offer_at: str) -> None:
    """Position by position, wherever chunks and prefix end, and whoever comes first."""
    sent = iter(range(10, 15))
    sends: list[Event] = [
        Sent(0, packed(*itertools.islice(sent, count)), last=number == len(chunks) - 1)
        for number, count in enumerate(chunks)
    ]
    place = {"before": 0, "in the middle": 1, "after": len(sends)}[offer_at]
    offer = Offered(0, packed(*range(20 + prefix, 25)), prefix)
    machine = machine_after(Paired(ONE_TO_ONE))
    effects = feed(machine, *sends[:place], offer, *sends[place:])
    moves = [effect for effect in effects if isinstance(effect, StartMove)]
    moved = [
        pair
        for move in moves
        for pair in zip(unpacked(move.source_pages), unpacked(move.destination_pages), strict=True)
    ]
    assert moved == [(10 + position, 20 + position) for position in range(prefix, 5)]
    feed(machine, *(Moved(move.move) for move in moves))
    assert machine.state is State.SUCCEEDED


@pytest.mark.parametrize(
    ("sends", "offer", "told"),
    [
        (
            [Sent(0, packed(1, 2, 3), last=True)],
            Offered(0, packed(5, 6), 0),
            "prefill rank 0 sent 3 pages, decode rank 0 offered 2 behind a prefix of 0",
        ),
        (
            [Sent(0, packed(1, 2, 3), last=True)],
            Offered(0, packed(5, 6), 2),
            "prefill rank 0 sent 3 pages, decode rank 0 offered 2 behind a prefix of 2",
        ),
        (
            [Sent(0, packed(1, 2), last=False), Sent(0, packed(3), last=False)],
            Offered(0, packed(5), 1),
            "prefill rank 0 sent 3 pages so far, decode rank 0 offered 1 behind a prefix of 1",
        ),
        (
            [Sent(0, b"", last=True)],
            Offered(0, packed(5), 0),
            "prefill rank 0 sent 0 pages, decode rank 0 offered 1 behind a prefix of 0",
        ),
    ],
    ids=["too few offered", "too many offered", "too few for the chunks so far", "nothing sent"],
)
@pytest.mark.parametrize("offer_first", [True, False])
def test_page_counts_that_differ_are_named_with_the_room(
    sends: list[Event], offer: Offered, told: str, *, offer_first: bool
) -> None:
    machine = machine_after(Paired(ONE_TO_ONE))
    feed(machine, *([offer, *sends] if offer_first else [*sends, offer]))
    assert machine.state is State.FAILED
    assert machine.failure == Failure(Reason.REJECTED, "", f"room 7: {told}")


def test_a_move_that_starts_with_the_mismatch_of_another_leg_is_revoked() -> None:
    """The effects come in an order that can be carried out: started, concluded, revoked."""
    machine = machine_after(Offered(0, packed(20), 0), Offered(1, packed(22), 0))
    feed(machine, Sent(0, packed(10), last=False), Sent(1, packed(12, 13), last=False))
    effects = feed(machine, Paired(PAIRS))
    assert [type(effect) for effect in effects] == [StartMove, Conclude, Revoke]
    assert machine.held == (Role.PREFILL, Role.DECODE)


# --- release -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", Role)
def test_a_side_is_released_when_its_last_move_is_quiet(side: Role) -> None:
    """Case C18: each side by itself, once, whatever the order."""
    for order in itertools.permutations(range(3)):
        machine = failed()
        *early, last = (MoveQuiet(move, side) for move in order)
        assert releases(*early, machine=machine) == []
        assert releases(last, machine=machine) == [side]
        assert releases(*early, last, machine=machine) == []
        assert machine.held == tuple(other for other in Role if other is not side)


def test_two_cancels_with_chunks_outstanding_release_each_side_once() -> None:
    """Case C18: two decode ranks give up the same handoff while its chunks are on their way."""
    machine = moving()
    second = Failure(Reason.CANCELLED_BY_DECODE, "decode-0/0", "me too")
    assert feed(machine, Aborted(CANCELLED)) == [Conclude(CANCELLED), Revoke((0, 1, 2))]
    assert feed(machine, Aborted(second)) == [Late(Aborted(second))]
    events = [MoveQuiet(move, side) for move in range(3) for side in Role]
    assert releases(*events, *events, machine=machine) == list(Role)
    assert machine.unsettled == ()


def test_an_error_releases_nothing_while_another_leg_runs() -> None:
    """Case C19: [error, still running] holds both sides until both legs are quiet."""
    machine = moving()
    feed(machine, Moved(1))
    error = MoveFailed(0, BROKEN, source_quiet=True, destination_quiet=True)
    assert feed(machine, error) == [Conclude(BROKEN), Revoke((2,))]
    assert machine.held == (Role.PREFILL, Role.DECODE)
    assert feed(machine, Moved(2)) == [Late(Moved(2)), *BOTH]


def test_the_source_may_be_quiet_long_before_the_destination() -> None:
    """Case C19: bytes that left the source may still land."""
    machine = moving()
    error = MoveFailed(0, BROKEN, source_quiet=True, destination_quiet=False)
    feed(machine, Moved(1), Moved(2))
    assert feed(machine, error) == [Conclude(BROKEN), Revoke((0,)), Release(Role.PREFILL)]
    assert feed(machine, MoveQuiet(0, Role.DECODE)) == [Release(Role.DECODE)]


def test_two_good_legs_release_at_once() -> None:
    """Case C19: [ok, ok] waits for nothing."""
    machine = moving()
    feed(machine, Moved(0), Moved(1))
    assert feed(machine, Moved(2)) == [Conclude(None), *BOTH]


def test_the_end_of_a_revoked_move_releases_too() -> None:
    """Case C19: a revoked move that never started says so as a late failure, quiet on both sides."""
    machine = failed()
    feed(machine, MoveQuiet(0, Role.PREFILL), MoveQuiet(0, Role.DECODE))
    revoked = [MoveFailed(move, CANCELLED, source_quiet=True, destination_quiet=True) for move in (1, 2)]
    assert feed(machine, *revoked) == [Late(revoked[0]), Late(revoked[1]), *BOTH]
    assert machine.failure is BROKEN


def test_nothing_in_flight_releases_with_the_verdict() -> None:
    """Case C22: refused before anything moved."""
    machine = machine_after(Opened(0), Opened(1))
    assert feed(machine, Aborted(CANCELLED)) == [Conclude(CANCELLED), *BOTH]


# --- what it says of itself ------------------------------------------------------------------------


def test_the_clock_starts_once_at_the_first_complete_rank() -> None:
    """Case C01: chunks start no clock, the first rank's last one does."""
    machine = machine_after(Paired(PAIRS), Opened(0))
    effects = feed(machine, Sent(1, packed(1), last=False), Sent(0, packed(1), last=False))
    assert effects == []
    assert feed(machine, Sent(1, b"", last=True)) == [StartClock()]
    assert feed(machine, Sent(0, b"", last=True)) == []


def test_only_the_aux_of_rank_0_counts() -> None:
    """Case C29: rank 0's last chunk carries the side data."""
    machine = machine_after(Paired(PAIRS), Sent(1, b"", last=True, aux=b"of rank 1"))
    feed(machine, Sent(0, packed(1), last=False, aux=b"not the last"))
    assert machine.aux == b""
    feed(machine, Sent(0, b"", last=True, aux=AUX))
    assert machine.aux == AUX


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], "any sign of prefill for this room from prefill-0, the offer of decode-3"),
        ([Offered(0, b"", 0)], "any sign of prefill for this room from prefill-0"),
        ([Opened(0)], "the offer of decode-3"),
        (
            [Paired(PAIRS), Opened(1), Offered(0, packed(20), 0)],
            "prefill-complete of prefill-0/0, prefill-complete of prefill-0/1, the offer of decode-3/1",
        ),
        (
            [Paired(PAIRS), Offered(0, packed(20), 0), Offered(1, b"", 1), Sent(0, packed(10), last=True)],
            "prefill-complete of prefill-0/1, the leg prefill-0/0 -> decode-3/0",
        ),
    ],
)
def test_it_names_what_is_missing(events: list[Event], told: str) -> None:
    """Case C12: the deadline's message says what it waited for."""
    assert machine_after(*events).missing("prefill-0", "decode-3") == told


def test_long_lists_of_missing_things_are_cut() -> None:
    many = Pairing.of(64, 64, tuple((rank, rank) for rank in range(64)))
    text = machine_after(Paired(many), Opened(0)).missing()
    assert text.count("prefill-complete of") == 7
    assert text.endswith("prefill-complete of prefill/6 and 57 more")


def test_the_story_tells_each_state_its_time_and_its_cause() -> None:
    machine = HandoffMachine(7, 1)
    machine.apply(Paired(PAIRS), 1.0)
    machine.apply(Offered(0, packed(20, 21), 0), 2.0)
    machine.apply(Sent(0, packed(10, 11), last=True), 3.0)
    machine.apply(Offered(1, packed(22), 0), 4.0)
    machine.apply(Extended(1), 5.0)
    machine.apply(Sent(1, packed(12), last=True), 6.0)
    machine.apply(MoveFailed(0, BROKEN, source_quiet=True, destination_quiet=True), 7.0)
    machine.apply(Aborted(CANCELLED), 8.0)
    assert [(step.at_s, step.state, step.cause) for step in machine.story] == [
        (3.0, State.WAITING, "Sent by rank 0"),
        (6.0, State.MOVING, "Sent by rank 1"),
        (7.0, State.FAILED, "MoveFailed transport: the link to decode-0/0 broke"),
    ]


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (Aborted(CANCELLED), "Aborted cancelled_by_decode: the client went away"),
        (
            Sent(0, packed(1, 2, 3), last=False),
            f"Sent by rank 0 rejected: room 7: {TOO_MANY}",
        ),
    ],
    ids=["aborted", "mismatch"],
)
def test_the_story_tells_why_it_failed(event: Event, cause: str) -> None:
    machine = open_()
    feed(machine, event)
    assert machine.story[-1].cause == cause


def test_the_story_is_bounded() -> None:
    """However many events come, it holds only the transitions."""
    machine = machine_after(Paired(ONE_TO_ONE))
    feed(machine, *(Sent(0, packed(page), last=False) for page in range(200)))
    feed(machine, Sent(0, b"", last=True), *(Extended(0) for _ in range(200)))
    feed(machine, Aborted(CANCELLED), *(Aborted(BROKEN) for _ in range(200)))
    assert [step.state for step in machine.story] == [State.WAITING, State.FAILED]
