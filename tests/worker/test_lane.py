"""A lane, move by move, over a backend worked by hand: what is posted when, and what is reported."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from backends.base import PeerDisconnectedError, TransferError
from coordinator.messages import (
    Connected,
    ConnectFailed,
    Fenced,
    FencePeer,
    MoveDone,
    MoveFailed,
    MoveSettled,
    Progress,
    Revoke,
)
from coordinator.worker import mover as mover_module
from coordinator.worker.settings import Budget
from tests.worker.hand import MOST_MOVING, HandBackend, HandLink, HandTransfer
from tests.worker.support import (
    LAYOUT,
    PAGE_BYTES,
    Receiver,
    Sender,
    eventually,
    move,
    threads_end,
    threads_of,
)

if TYPE_CHECKING:
    from tests.worker.conftest import MakeReceiver, MakeSender

#: Two blocks a post: a page has one in each of the two planes.
TWO_BLOCKS = Budget(post_blocks=2)
POST_BYTES = LAYOUT.planes * PAGE_BYTES


class Bench:
    """A sender over a hand-worked backend, connected to one receiver."""

    def __init__(self, sender: Sender, backend: HandBackend, receiver: Receiver) -> None:
        self.sender = sender
        self.backend = backend
        self.receiver = receiver
        sender.connect(receiver)

    @property
    def link(self) -> HandLink:
        return self.backend.links[-1]

    def move(self, number: int, pages: int) -> None:
        self.sender.obey(move(number, self.receiver, range(pages)))


@pytest.fixture
def backend() -> HandBackend:
    return HandBackend()


@pytest.fixture
def bench(make_sender: MakeSender, backend: HandBackend, receiver: Receiver) -> Bench:
    return Bench(make_sender(backend=backend, budget=TWO_BLOCKS), backend, receiver)


# --- posting -----------------------------------------------------------------------------------


def test_a_move_is_done_when_its_last_post_is(bench: Bench) -> None:
    bench.move(1, pages=2)
    first, second = bench.link.wait_for_writes(2)

    second.end()
    second.wait_until_settled()
    assert bench.sender.reports.of(1) == []
    first.end()

    (done,) = bench.sender.reports.wait(MoveDone)
    assert (done.move, done.size_bytes) == (1, 2 * POST_BYTES)
    assert done.seconds > 0


def test_no_more_is_outstanding_than_the_backend_allows(bench: Bench) -> None:
    """The hand-worked backend itself asserts the bound at each write."""
    bench.move(1, pages=20)
    for number in range(20):
        writes = bench.link.wait_for_writes(number + 1)
        assert len(writes) <= number + MOST_MOVING
        writes[number].end()

    (done,) = bench.sender.reports.wait(MoveDone)
    assert done.size_bytes == 20 * POST_BYTES


def test_no_more_bytes_are_in_flight_than_the_budget_allows(
    make_sender: MakeSender, backend: HandBackend, receiver: Receiver
) -> None:
    budget = Budget(post_blocks=2, in_flight_bytes=2 * POST_BYTES)
    bench = Bench(make_sender(backend=backend, budget=budget), backend, receiver)
    bench.move(1, pages=6)

    for number in range(6):
        writes = bench.link.wait_for_writes(number + 1)
        assert len([write for write in writes if not write.settled]) <= 2
        # The next post is there before the first of two has ended, so the engine never runs dry.
        if number < 5:
            bench.link.wait_for_writes(number + 2)
        writes[number].end()

    bench.sender.reports.wait(MoveDone)


def test_a_short_move_overtakes_a_huge_one(bench: Bench) -> None:
    """Case C49: short handoffs keep moving."""
    bench.move(1, pages=60)
    bench.link.wait_for_writes(MOST_MOVING)
    bench.move(2, pages=1)

    ended = 0
    while not bench.sender.reports.of(2):
        for write in bench.link.wait_for_writes(ended + 1)[ended:]:
            write.end()
            write.wait_until_settled()
            ended += 1

    assert bench.sender.reports.of(1) == []
    # Behind what was posted when it came, and the huge one's next turn.
    assert ended <= 2 * MOST_MOVING + 2
    bench.sender.obey(FencePeer(bench.receiver.peer))
    bench.sender.reports.wait(Fenced)


def test_a_move_of_no_pages_is_done_at_once(bench: Bench) -> None:
    """Case C48."""
    bench.move(1, pages=0)

    (done,) = bench.sender.reports.wait(MoveDone)
    assert done.size_bytes == 0
    assert bench.link.writes == []


def test_pages_that_are_not_in_the_pool_fail_that_move_alone(bench: Bench) -> None:
    bench.sender.obey(move(1, bench.receiver, [0, 64]), move(2, bench.receiver, [0], to=[-1]))
    bench.move(3, pages=1)
    bench.link.wait_for_writes(1)[0].end()

    bench.sender.reports.wait(MoveDone, where=lambda done: done.move == 3)
    first, second = bench.sender.reports.wait(MoveFailed, count=2)
    assert "page 64" in first.message
    assert "page -1" in second.message
    for failed in (first, second):
        assert (failed.kind, failed.settled, failed.started) == ("transport", True, False)


def test_a_number_that_is_under_way_is_not_taken_twice(bench: Bench) -> None:
    bench.move(1, pages=1)
    bench.link.wait_for_writes(1)
    bench.move(1, pages=1)
    bench.move(2, pages=1)
    for write in bench.link.wait_for_writes(2):
        write.end()

    bench.sender.reports.wait(MoveDone, count=2)
    assert len(bench.sender.reports.of(1)) == 1
    assert len(bench.link.writes) == 2


# --- failures ----------------------------------------------------------------------------------


def test_a_failed_move_settles_with_the_last_of_its_posts(bench: Bench) -> None:
    """Case C19: [error, still running] is not quiet."""
    bench.move(1, pages=3)
    first, second, third = bench.link.wait_for_writes(3)

    first.end(TransferError("broken"))
    (failed,) = bench.sender.reports.wait(MoveFailed)
    assert (failed.kind, failed.message) == ("transport", "broken")
    assert (failed.settled, failed.started) == (False, True)
    second.end(TransferError("broken too"), settled=False)
    third.end()
    third.wait_until_settled()
    assert len(bench.sender.reports.of(1)) == 1
    second.end(TransferError("broken too"))

    bench.sender.reports.wait(MoveSettled)
    assert [type(report) for report in bench.sender.reports.of(1)] == [MoveFailed, MoveSettled]


def test_a_failure_stops_the_posts_that_were_still_to_come(bench: Bench) -> None:
    bench.move(1, pages=10)
    writes = bench.link.wait_for_writes(MOST_MOVING)
    for write in writes:
        write.end(TransferError("broken"))
    bench.sender.reports.wait(MoveSettled)

    bench.move(2, pages=1)
    bench.link.wait_for_writes(MOST_MOVING + 1)[-1].end()
    bench.sender.reports.wait(MoveDone)
    assert len(bench.link.writes) == MOST_MOVING + 1


def test_a_failure_that_has_settled_says_so_at_once(bench: Bench) -> None:
    bench.move(1, pages=1)
    bench.link.wait_for_writes(1)[0].end(TransferError("broken"))

    (failed,) = bench.sender.reports.wait(MoveFailed)
    assert failed.settled
    assert bench.sender.reports.of(1) == [failed]


def test_a_failure_that_does_not_settle_leaves_the_budget_to_others(
    make_sender: MakeSender, backend: HandBackend, receiver: Receiver
) -> None:
    """Case C11: nixl settles a failed transfer only when its link is fenced."""
    one_at_a_time = Budget(post_blocks=2, in_flight_bytes=1)
    bench = Bench(make_sender(backend=backend, budget=one_at_a_time), backend, receiver)
    bench.move(1, pages=1)
    bench.move(2, pages=2)
    bench.link.wait_for_writes(1)[0].end(TransferError("broken"), settled=False)

    bench.link.wait_for_writes(2)[1].end()
    bench.link.wait_for_writes(3)[2].end()
    (done,) = bench.sender.reports.wait(MoveDone)
    assert done.move == 2
    (failed,) = bench.sender.reports.of(1)
    assert isinstance(failed, MoveFailed)
    assert not failed.settled


def test_a_refused_post_fails_its_move_alone(bench: Bench) -> None:
    """Case C11: one failed send to a healthy peer."""
    bench.link.write_error = TransferError("no")
    bench.move(1, pages=1)
    (failed,) = bench.sender.reports.wait(MoveFailed)
    assert (failed.kind, failed.settled, failed.started) == ("transport", True, False)

    bench.link.write_error = None
    bench.move(2, pages=1)
    bench.link.wait_for_writes(1)[0].end()
    bench.sender.reports.wait(MoveDone)


def test_a_long_message_is_cut_to_what_a_report_may_carry(bench: Bench) -> None:
    bench.link.write_error = TransferError("x" * 10_000)
    bench.move(1, pages=1)

    (failed,) = bench.sender.reports.wait(MoveFailed)
    assert failed.message == "x" * 4096


@pytest.mark.parametrize("at", ["poll", "write"])
def test_a_lost_peer_fails_everything_and_the_next_connect_begins_anew(bench: Bench, at: str) -> None:
    """Case C10: a disconnect at post or at poll."""
    bench.move(1, pages=2)
    bench.move(2, pages=5)
    first, *_ = bench.link.wait_for_writes(MOST_MOVING)
    dead = bench.link
    lost = PeerDisconnectedError("peer went away")
    if at == "write":
        dead.write_error = lost
        first.end()
    else:
        first.end(lost)

    for failed in bench.sender.reports.wait(MoveFailed, count=2):
        assert (failed.kind, failed.message) == ("disconnected", "peer went away")
    # Nothing more can come of that link: it is fenced at once, which settles what was moving.
    assert eventually(lambda: dead.fenced)
    bench.move(3, pages=1)
    (late,) = bench.sender.reports.wait(MoveFailed, where=lambda failed: failed.move == 3)
    assert (late.kind, late.settled, late.started) == ("disconnected", True, False)

    bench.sender.connect(bench.receiver)
    assert bench.link is not dead
    bench.move(4, pages=1)
    bench.link.wait_for_writes(1)[0].end()
    bench.sender.reports.wait(MoveDone, where=lambda done: done.move == 4)
    for number in (1, 2):
        last = bench.sender.reports.of(number)[-1]
        assert isinstance(last, MoveSettled) or (isinstance(last, MoveFailed) and last.settled)


def test_a_lost_peer_that_cannot_be_fenced_leaves_its_moves_unsettled(bench: Bench) -> None:
    bench.link.fence_errors = ["engine is stuck"]
    bench.move(1, pages=2)
    first, second = bench.link.wait_for_writes(2)
    first.end(PeerDisconnectedError("peer went away"))
    (failed,) = bench.sender.reports.wait(MoveFailed)
    assert not failed.settled
    bench.move(2, pages=1)
    bench.sender.reports.wait(MoveFailed, count=2)
    assert bench.sender.reports.of(1) == [failed]

    # What still moves is asked after all the same, link or no link.
    second.end(TransferError("at last"))
    bench.sender.reports.wait(MoveSettled)


def test_without_a_link_a_move_fails_at_once_however_much_still_moves(bench: Bench) -> None:
    bench.link.fence_errors = ["engine is stuck"]
    bench.move(1, pages=MOST_MOVING)
    writes = bench.link.wait_for_writes(MOST_MOVING)
    writes[0].end(PeerDisconnectedError("peer went away"), settled=False)
    bench.sender.reports.wait(MoveFailed)

    bench.move(2, pages=1)

    failed = bench.sender.reports.wait(MoveFailed, count=2)[1]
    assert (failed.move, failed.kind, failed.settled) == (2, "disconnected", True)
    for write in writes:
        write.end(TransferError("at last"))
    bench.sender.reports.wait(MoveSettled)


# --- connecting --------------------------------------------------------------------------------


def test_moves_wait_for_the_connect(
    make_sender: MakeSender, backend: HandBackend, receiver: Receiver
) -> None:
    sender = make_sender(backend=backend)
    backend.may_connect.clear()
    sender.obey(receiver.connect(), move(1, receiver, [0]))
    backend.may_connect.set()

    sender.reports.wait(Connected)
    backend.links[0].wait_for_writes(1)[0].end()
    sender.reports.wait(MoveDone)


def test_a_move_revoked_while_connecting_fails_at_once_and_is_never_posted(
    make_sender: MakeSender, backend: HandBackend, receiver: Receiver
) -> None:
    """Case C20: the late callback sees that the attempt is over and posts nothing."""
    sender = make_sender(backend=backend)
    backend.may_connect.clear()
    sender.obey(receiver.connect(), move(1, receiver, [0]), move(2, receiver, [0]), Revoke([1]))

    (failed,) = sender.reports.wait(MoveFailed)
    assert (failed.kind, failed.settled, failed.started) == ("revoked", True, False)
    assert sender.reports.all == [failed]
    backend.may_connect.set()
    backend.links_came(1)[0].wait_for_writes(1)[0].end()
    (done,) = sender.reports.wait(MoveDone)
    assert done.move == 2
    assert len(backend.links[0].writes) == 1


def test_a_failed_connect_fails_each_waiting_move_and_may_be_tried_again(
    make_sender: MakeSender, backend: HandBackend, receiver: Receiver
) -> None:
    sender = make_sender(backend=backend)
    refused = receiver.connect()
    refused = type(refused)(refused.peer, b"refuse", LAYOUT, 1, 0, receiver.pool.pages)
    sender.obey(refused, move(1, receiver, [0]), move(2, receiver, [0]))

    (connect,) = sender.reports.wait(ConnectFailed)
    assert "decode/0 refuses" in connect.message
    for failed in sender.reports.wait(MoveFailed, count=2):
        assert (failed.kind, failed.settled, failed.started) == ("connect", True, False)
        assert failed.message == connect.message
    sender.connect(receiver)
    sender.obey(move(3, receiver, [0]))
    backend.links[0].wait_for_writes(1)[0].end()
    sender.reports.wait(MoveDone)


def test_layouts_that_do_not_fit_fail_the_connect(
    make_sender: MakeSender, backend: HandBackend, receiver: Receiver
) -> None:
    """Case C47, at the last door."""
    sender = make_sender(backend=backend)
    command = receiver.connect()
    other = msgspec.structs.replace(LAYOUT, page_tokens=16)
    sender.obey(type(command)(command.peer, command.endpoint, other, 1, 0, command.pages))

    (failed,) = sender.reports.wait(ConnectFailed)
    assert "page_tokens: prefill has 8, decode has 16" in failed.message
    assert backend.links == []


def test_connecting_again_to_the_same_endpoint_changes_nothing(bench: Bench) -> None:
    bench.move(1, pages=1)
    (write,) = bench.link.wait_for_writes(1)
    bench.sender.connect(bench.receiver)
    write.end()

    bench.sender.reports.wait(MoveDone)
    bench.move(2, pages=1)
    bench.link.wait_for_writes(2)[1].end()
    bench.sender.reports.wait(MoveDone, count=2)
    assert len(bench.backend.links) == 1


def test_connecting_elsewhere_ends_what_the_old_link_had(bench: Bench) -> None:
    """Case C07: nothing goes on towards an incarnation that was replaced."""
    old = bench.link
    bench.move(1, pages=1)
    old.wait_for_writes(1)
    command = bench.receiver.connect()
    bench.sender.obey(type(command)(command.peer, b"new place", LAYOUT, 1, 0, command.pages))

    bench.sender.reports.wait(Connected, count=2)
    assert old.fenced
    assert bench.link is not old
    failed, settled = bench.sender.reports.of(1)
    assert isinstance(failed, MoveFailed)
    assert failed.kind == "disconnected"
    assert isinstance(settled, MoveSettled)


# --- revoking and fencing ----------------------------------------------------------------------


def test_a_revoke_drops_what_is_not_posted_and_waits_for_the_rest(bench: Bench) -> None:
    bench.move(1, pages=10)
    writes = bench.link.wait_for_writes(MOST_MOVING)
    bench.sender.obey(Revoke([1, 77]))
    (failed,) = bench.sender.reports.wait(MoveFailed)
    assert (failed.kind, failed.settled, failed.started) == ("revoked", False, True)

    for write in writes:
        assert len(bench.sender.reports.of(1)) == 1
        write.end()
        write.wait_until_settled()
    bench.sender.reports.wait(MoveSettled)
    assert len(bench.link.writes) == MOST_MOVING


def test_a_revoke_of_a_move_that_is_over_says_nothing(bench: Bench) -> None:
    bench.move(1, pages=1)
    bench.link.wait_for_writes(1)[0].end()
    bench.sender.reports.wait(MoveDone)
    bench.sender.obey(Revoke([1]))
    bench.move(2, pages=1)
    bench.link.wait_for_writes(2)[1].end()

    bench.sender.reports.wait(MoveDone, count=2)
    assert len(bench.sender.reports.of(1)) == 1


def test_a_command_is_heard_between_two_posts(bench: Bench) -> None:
    """A revoke that comes during the first of many posts lets no second one out."""
    bench.link.on_write = lambda: bench.sender.obey(Revoke([1]))
    bench.move(1, pages=10)
    bench.link.wait_for_writes(1)[0].end()

    bench.sender.reports.wait(MoveSettled)
    assert len(bench.link.writes) == 1


def test_a_fence_settles_everything_and_comes_last(bench: Bench) -> None:
    bench.move(1, pages=2)
    bench.move(2, pages=40)
    bench.link.wait_for_writes(MOST_MOVING)
    bench.sender.obey(FencePeer(bench.receiver.peer))

    (fenced,) = bench.sender.reports.wait(Fenced)
    assert fenced == Fenced(bench.receiver.peer, "")
    reports = bench.sender.reports.all
    assert reports[-1] == fenced
    for number in (1, 2):
        failed, settled = bench.sender.reports.of(number)
        assert isinstance(failed, MoveFailed)
        assert failed.kind == "disconnected"
        assert isinstance(settled, MoveSettled)


def test_a_fenced_lane_leaves_no_thread_and_its_peer_can_be_connected_again(bench: Bench) -> None:
    peer = bench.receiver.peer
    for round_ in range(3):
        bench.sender.obey(FencePeer(peer))
        bench.sender.reports.wait(Fenced, count=round_ + 1)
        assert threads_end(peer)
        bench.sender.connect(bench.receiver)
        assert threads_of(peer) == 1

    bench.move(1, pages=1)
    bench.link.wait_for_writes(1)[0].end()
    bench.sender.reports.wait(MoveDone)


def test_what_comes_right_behind_a_fence_is_served(bench: Bench) -> None:
    bench.sender.obey(FencePeer(bench.receiver.peer), bench.receiver.connect(), move(1, bench.receiver, [0]))

    bench.sender.reports.wait(Connected, count=2)
    first, second = bench.backend.links
    assert first.fenced
    second.wait_for_writes(1)[0].end()
    bench.sender.reports.wait(MoveDone)


def test_a_fence_that_fails_says_so_and_can_be_tried_again(bench: Bench) -> None:
    bench.link.fence_errors = ["engine is stuck"]
    bench.move(1, pages=1)
    bench.link.wait_for_writes(1)
    bench.sender.obey(FencePeer(bench.receiver.peer))

    (fenced,) = bench.sender.reports.wait(Fenced)
    assert fenced.error == "engine is stuck"
    (failed,) = bench.sender.reports.of(1)
    assert isinstance(failed, MoveFailed)
    assert not failed.settled

    bench.sender.obey(FencePeer(bench.receiver.peer))
    _, again = bench.sender.reports.wait(Fenced, count=2)
    assert again.error == ""
    assert bench.sender.reports.of(1)[-1] == MoveSettled(1)


def test_why_a_link_cannot_be_fenced_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of a life nobody sends the reports any more."""
    bench.link.fence_errors = ["engine is stuck"] * 3 + ["engine is lost"] + ["engine is stuck"]
    for count in range(1, 7):
        bench.sender.obey(FencePeer(bench.receiver.peer))
        bench.sender.reports.wait(Fenced, count=count)

    told = [record.getMessage() for record in caplog.records if "cannot be fenced" in record.getMessage()]
    stuck, lost = (f"the link to decode/0 cannot be fenced: engine is {what}" for what in ("stuck", "lost"))
    assert told == [stuck, lost, stuck]


def test_a_lane_whose_fence_failed_is_not_taken_for_fenced(bench: Bench) -> None:
    """Even when it had no moves: what it sends with is still there."""
    bench.link.fence_errors = ["engine is stuck"]
    bench.sender.obey(FencePeer(bench.receiver.peer))
    bench.sender.reports.wait(Fenced)
    bench.move(1, pages=1)
    bench.sender.reports.wait(MoveFailed)
    bench.sender.obey(FencePeer(bench.receiver.peer))

    first, second = bench.sender.reports.wait(Fenced, count=2)
    assert (first.error, second.error) == ("engine is stuck", "")
    assert bench.link.fenced


# --- progress and rest -------------------------------------------------------------------------


def test_progress_names_what_got_on_and_what_waits_but_not_what_stands_still(
    make_sender: MakeSender,
    backend: HandBackend,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover_module, "PROGRESS_S", 0.0)
    bench = Bench(make_sender(backend=backend, budget=TWO_BLOCKS), backend, receiver)
    bench.move(1, pages=1)
    bench.move(2, pages=1)
    bench.move(3, pages=8)
    _, _, third = bench.link.wait_for_writes(3)
    bench.move(4, pages=1)
    bench.move(5, pages=1)
    assert not [report for report in bench.sender.reports.all if isinstance(report, Progress)]

    third.end()

    # 1 and 2 stand still; 4 has taken the place that became free; 5 waits, and 3 for its next turn.
    progress = bench.sender.reports.wait(Progress)[0]
    assert {3, 5} <= set(progress.moves) <= {3, 4, 5}


def test_a_move_of_which_a_part_has_arrived_got_on(
    make_sender: MakeSender,
    backend: HandBackend,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single post of a slow engine may take longer than a handoff may stand still."""
    monkeypatch.setattr(mover_module, "PROGRESS_S", 0.0)
    bench = Bench(make_sender(backend=backend, budget=TWO_BLOCKS), backend, receiver)
    bench.move(1, pages=1)
    bench.move(2, pages=1)
    _, second = bench.link.wait_for_writes(2)

    second.gets_on = True

    assert bench.sender.reports.wait(Progress)[0].moves == [2]


def test_no_progress_is_told_when_nothing_is_left_that_got_on(bench: Bench) -> None:
    for number in (1, 2):
        bench.move(number, pages=1)
        bench.link.wait_for_writes(number)[number - 1].end()
        bench.sender.reports.wait(MoveDone, count=number)
    bench.sender.obey(FencePeer(bench.receiver.peer))
    bench.sender.reports.wait(Fenced)
    assert not [report for report in bench.sender.reports.all if isinstance(report, Progress)]


def test_a_transfer_that_gets_on_is_asked_as_often_as_at_its_begin(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may need every poll to go on, as that of Mooncake does, which gets few pieces at a time."""
    # It comes to rest soon.
    monkeypatch.setattr(mover_module, "SLEEP_SHARE", 0.02)
    bench.move(1, pages=1)
    (write,) = bench.link.wait_for_writes(1)
    assert eventually(lambda: _rests(write))

    asked, write.gets_on = write.polls, True

    # At the pace before there would be 50 for each e-fold of time: less than 200, however patient one is.
    assert eventually(lambda: write.polls > asked + 400)
    write.end()
    bench.sender.reports.wait(MoveDone)


def test_an_engine_that_is_busy_is_let_alone(bench: Bench) -> None:
    """While every transfer says so; one that does not is asked at once again."""
    bench.move(1, pages=1)
    bench.move(2, pages=1)
    first, second = bench.link.wait_for_writes(2)
    first.gets_on = second.gets_on = True

    first.wants_s = second.wants_s = 0.03
    assert eventually(lambda: _rests(first))
    second.wants_s = 0.0

    asked = first.polls
    assert eventually(lambda: first.polls > asked + 400)
    first.end()
    second.end()
    bench.sender.reports.wait(MoveDone)


def test_an_engine_that_has_all_it_may_have_is_let_alone_though_more_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It comes to rest at once.
    monkeypatch.setattr(mover_module, "SLEEP_SHARE", 10.0)
    bench.move(1, pages=MOST_MOVING + 1)
    writes = bench.link.wait_for_writes(MOST_MOVING)
    assert eventually(lambda: _rests(writes[0]))

    for write in writes:
        write.end()
    bench.link.wait_for_writes(MOST_MOVING + 1)[-1].end()
    bench.sender.reports.wait(MoveDone)


def _rests(write: HandTransfer) -> bool:
    """Whether the lane has come to ask it only now and then."""
    asked = write.polls
    time.sleep(0.03)  # the time that passes is what this is about
    return write.polls - asked <= 1


def test_progress_is_told_now_and_then_only(bench: Bench) -> None:
    """Several hundred posts of one move, all done within much less than the interval each."""
    started_s = time.monotonic()
    bench.move(1, pages=64)
    for number in range(64):
        bench.link.wait_for_writes(number + 1)[number].end()
    bench.sender.reports.wait(MoveDone)
    took_s = time.monotonic() - started_s

    told = [report for report in bench.sender.reports.all if isinstance(report, Progress)]
    assert 1 <= len(told) <= 1 + took_s / mover_module.PROGRESS_S


def test_a_transfer_that_stands_still_is_asked_ever_more_rarely(bench: Bench) -> None:
    """Case C50: nothing moving costs next to nothing."""
    bench.move(1, pages=1)
    (write,) = bench.link.wait_for_writes(1)
    time.sleep(1.0)  # the time that passes is what this test is about
    asked = write.polls

    # A sleep of 0.5 % means 200 for each e-fold of time, from 4 ms on; and 200 short ones before.
    assert 20 <= asked <= 2000
    write.end()
    bench.sender.reports.wait(MoveDone)


# --- crashes -----------------------------------------------------------------------------------


def test_a_backend_that_breaks_its_contract_is_heard_of(bench: Bench, make_receiver: MakeReceiver) -> None:
    """No exception may end a lane unseen; the other lanes go on."""
    bench.sender.may_crash = True
    bench.link.write_error = ZeroDivisionError("from a native library")
    bench.move(1, pages=1)
    assert bench.sender.crashed.wait(10)

    other = make_receiver("decode/1")
    bench.sender.connect(other)
    bench.sender.obey(move(2, other, [0]))
    bench.link.wait_for_writes(1)[0].end()
    bench.sender.reports.wait(MoveDone)
    assert bench.sender.reports.of(1) == []
