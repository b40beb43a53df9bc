"""A host over the real loopback backend: bytes, scripted faults, peers that do not disturb each other."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.loopback import LoopbackBackend
from coordinator.errors import LayoutError, PoolError
from coordinator.layout import Layout
from coordinator.messages import (
    ConnectFailed,
    Fenced,
    FencePeer,
    MoveDone,
    MoveFailed,
    MoveSettled,
    Progress,
    Revoke,
)
from coordinator.worker.host import WorkerHost
from coordinator.worker.places import RankPool
from coordinator.worker.settings import Budget
from tests.worker.hand import HandBackend
from tests.worker.support import LAYOUT, PAGES, eventually, move, threads_end, threads_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.worker.conftest import MakeReceiver, MakeSender
    from tests.worker.support import Receiver

#: Two blocks a post: a page has one in each of the two planes.
TWO_BLOCKS = Budget(post_blocks=2)


def fault(kind: str, **fields: object) -> dict[str, object]:
    return {"faults": [{"kind": kind, **fields}]}


# --- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [Budget(), TWO_BLOCKS, Budget(post_blocks=7, in_flight_bytes=1)])
def test_every_page_arrives_and_no_other_is_touched(
    make_sender: MakeSender, receiver: Receiver, budget: Budget
) -> None:
    sender = make_sender(budget=budget)
    sender.connect(receiver)
    ours = random.Random(1).sample(range(PAGES), 40)
    theirs = random.Random(2).sample(range(PAGES), 40)
    expected = np.zeros_like(receiver.pool.by_page)
    expected[:, theirs] = sender.pool.by_page[:, ours]

    sender.obey(move(1, receiver, ours, theirs))

    (done,) = sender.reports.wait(MoveDone)
    assert done.size_bytes == 40 * LAYOUT.planes * LAYOUT.page_bytes(1)
    assert np.array_equal(receiver.pool.by_page, expected)


def test_a_short_move_ends_before_a_huge_one_that_came_first(
    make_sender: MakeSender, receiver: Receiver
) -> None:
    """Case C49: short handoffs keep moving."""
    sender = make_sender(budget=TWO_BLOCKS)
    sender.obey(receiver.connect(), move(1, receiver, range(60)), move(2, receiver, [60]))

    first, second = sender.reports.wait(MoveDone, count=2)
    assert (first.move, second.move) == (2, 1)


@pytest.mark.parametrize("seed", range(5))
def test_each_of_many_moves_ends_exactly_once(
    make_sender: MakeSender, make_receiver: MakeReceiver, seed: int
) -> None:
    """Random moves to four peers of which one fails at times, with revokes among them."""
    drawn = random.Random(seed)
    faults = [
        {"kind": "fail", "peer": "decode/3", "nth": nth, "settle_s": drawn.choice([0, 0.01])}
        for nth in range(2, 200, 5)
    ]
    sender = make_sender({"faults": faults}, budget=Budget(post_blocks=drawn.choice([2, 6, 100])))
    receivers = [make_receiver(f"decode/{rank}") for rank in range(4)]
    sender.obey(*(receiver.connect() for receiver in receivers))
    numbers = range(1, 201)
    for number in numbers:
        pages = drawn.sample(range(PAGES), drawn.randint(0, 12))
        sender.obey(move(number, drawn.choice(receivers), pages))
        if drawn.random() < 0.2:
            sender.obey(Revoke([drawn.randint(1, number), drawn.randint(1, 250)]))

    def over(number: int) -> bool:
        match sender.reports.of(number):
            case [MoveDone()] | [MoveFailed(settled=True)] | [MoveFailed(settled=False), MoveSettled()]:
                return True
            case _:
                return False

    assert eventually(lambda: all(over(number) for number in numbers))
    sender.obey(*(FencePeer(receiver.peer) for receiver in receivers))
    sender.reports.wait(Fenced, count=4)
    assert all(over(number) for number in numbers)


# --- faults ------------------------------------------------------------------------------------


def test_a_failure_that_settles_later_is_told_in_two_steps(
    make_sender: MakeSender, receiver: Receiver
) -> None:
    sender = make_sender(fault("fail", nth=1, settle_s=0.05))
    sender.connect(receiver)
    sender.obey(move(1, receiver, [1]))
    sender.obey(move(2, receiver, [2]))

    sender.reports.wait(MoveSettled)
    failed, settled = sender.reports.of(1)
    assert isinstance(failed, MoveFailed)
    assert (failed.kind, failed.settled, failed.started) == ("transport", False, True)
    assert settled == MoveSettled(1)
    # Case C11: the peer is well, and so is the next move, while the first one has not settled.
    (done,) = sender.reports.wait(MoveDone)
    assert sender.reports.all.index(done) < sender.reports.all.index(settled)


def test_a_post_refused_in_the_middle_fails_a_move_that_has_started(
    make_sender: MakeSender, receiver: Receiver
) -> None:
    sender = make_sender(fault("refuse", nth=3), budget=TWO_BLOCKS)
    sender.connect(receiver)
    sender.obey(move(1, receiver, range(5)))

    (failed,) = sender.reports.wait(MoveFailed)
    assert (failed.kind, failed.settled, failed.started) == ("transport", True, True)
    assert "refuse" in failed.message


def test_a_connect_that_is_refused_once_works_the_second_time(
    make_sender: MakeSender, receiver: Receiver
) -> None:
    sender = make_sender(fault("refuse", on="connect", nth=1))
    sender.obey(receiver.connect(), move(1, receiver, [1]))
    sender.reports.wait(ConnectFailed)
    sender.obey(receiver.connect(), move(2, receiver, [2]))

    sender.reports.wait(MoveDone)
    (failed,) = sender.reports.of(1)
    assert isinstance(failed, MoveFailed)
    assert failed.kind == "connect"


def test_a_peer_that_died_is_disconnected_and_its_successor_is_served(
    make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    """Case C07, with a backend that notices by itself."""
    sender = make_sender()
    first = make_receiver()
    sender.connect(first)
    first.die()
    sender.obey(move(1, first, [1]))
    (failed,) = sender.reports.wait(MoveFailed)
    assert (failed.kind, failed.settled) == ("disconnected", True)

    second = make_receiver()
    sender.connect(second)
    sender.obey(move(2, second, [1]))
    sender.reports.wait(MoveDone)
    assert np.array_equal(second.pool.by_page[:, 1], sender.pool.by_page[:, 1])
    assert not first.pool.bytes.any()


def test_a_disconnect_in_the_middle_fails_all_moves_of_that_peer_alone(
    make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    faults: dict[str, object] = {
        "faults": [
            {"kind": "stall", "peer": "decode/0", "nth": 1},
            {"kind": "disconnect", "peer": "decode/0", "nth": 2},
            {"kind": "stall", "peer": "decode/1", "for_s": 0.2},
        ]
    }
    sender = make_sender(faults)
    sick, well = make_receiver("decode/0"), make_receiver("decode/1")
    sender.connect(sick)
    sender.connect(well)
    sender.obey(move(1, sick, [1]), move(2, well, [1]), move(3, sick, [2]), move(4, sick, [3]))

    for failed in sender.reports.wait(MoveFailed, count=3):
        assert failed.kind == "disconnected"
    assert eventually(lambda: sender.reports.of(1)[-1] == MoveSettled(1))
    (done,) = sender.reports.wait(MoveDone)
    assert done.move == 2


def test_a_revoked_move_posts_no_more(make_sender: MakeSender, receiver: Receiver, tmp_path: Path) -> None:
    """Case C17, the half of it that is ours: what was not posted never is."""
    control = tmp_path / "faults.toml"
    control.write_text('faults = [{kind = "stall", nth = 2}]')
    one_at_a_time = Budget(post_blocks=2, in_flight_bytes=1)
    sender = make_sender({"control": str(control)}, budget=one_at_a_time)
    sender.connect(receiver)
    sender.obey(move(1, receiver, range(1, 11)))
    assert eventually(lambda: bool(receiver.pool.by_page[:, 1].any()))
    sender.obey(Revoke([1]))
    (failed,) = sender.reports.wait(MoveFailed)
    assert (failed.kind, failed.settled, failed.started) == ("revoked", False, True)

    control.unlink()

    sender.reports.wait(MoveSettled)
    sender.obey(FencePeer(receiver.peer))
    sender.reports.wait(Fenced)
    # The first post and the one that stalled: the same two pages, each in a plane of its own.
    plane, page = np.nonzero(receiver.pool.by_page.any(axis=2))
    assert plane.tolist() == [0, 0, 1, 1]
    assert page.tolist() == [1, 2, 1, 2]


def test_progress_goes_on_while_a_long_move_does(make_sender: MakeSender, receiver: Receiver) -> None:
    """A slow move tells of itself before its end, so that it is not taken for one that stands still."""
    sender = make_sender(fault("slow", bytes_per_s=100_000), budget=Budget(post_blocks=2, in_flight_bytes=1))
    sender.connect(receiver)
    sender.obey(move(1, receiver, range(50)))

    sender.reports.wait(MoveDone)
    told = [report for report in sender.reports.all if isinstance(report, Progress)]
    assert len(told) >= 2
    assert all(report.moves == [1] for report in told)


# --- calls that do not return ------------------------------------------------------------------


@pytest.mark.parametrize("on", ["connect", "write"])
def test_a_call_that_hangs_holds_up_its_own_peer_only(
    make_sender: MakeSender, make_receiver: MakeReceiver, on: str
) -> None:
    # The thread that hangs outlives the test, so its peer has a name of its own.
    sender = make_sender(fault("hang", on=on, peer="stuck*"))
    stuck, well = make_receiver(f"stuck-in-{on}/0"), make_receiver("decode/1")
    sender.obey(stuck.connect(), move(1, stuck, [1]), move(2, stuck, [2]))
    sender.connect(well)
    sender.obey(move(3, well, [1]))
    sender.reports.wait(MoveDone, where=lambda done: done.move == 3)

    if on == "write":
        assert eventually(lambda: sender.host._lanes[stuck.peer]._jobs._jobs[1].taken)

    # A move that has not begun is revoked all the same, at once.
    sender.obey(Revoke([2]))
    (failed,) = sender.reports.wait(MoveFailed)
    assert (failed.move, failed.kind, failed.settled, failed.started) == (2, "revoked", True, False)

    # The fence of the one that hangs is never answered: that is how the coordinator knows.
    sender.obey(FencePeer(stuck.peer), FencePeer(well.peer))
    sender.reports.wait(Fenced, where=lambda fenced: fenced.peer == well.peer)
    assert [fenced.peer for fenced in sender.reports.wait(Fenced)] == [well.peer]
    assert not sender.host.close(0.1)


def test_without_a_thread_for_it_a_peer_is_not_connected_and_the_others_go_on(
    make_sender: MakeSender, make_receiver: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender()
    first, second = make_receiver("decode/0"), make_receiver("decode/1")
    sender.connect(first)

    def refuse(_: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        sender.obey(second.connect(), move(1, second, [1]))
    (failed,) = sender.reports.wait(ConnectFailed)
    assert failed.peer == second.peer
    assert "can't start new thread" in failed.message
    sender.reports.wait(MoveFailed, where=lambda failed: failed.move == 1 and failed.settled)
    sender.obey(move(2, first, [1]))
    sender.reports.wait(MoveDone)
    sender.connect(second)
    sender.obey(move(3, second, [1]))
    sender.reports.wait(MoveDone, count=2)


# --- peers that are not there ------------------------------------------------------------------


def test_a_move_to_a_peer_that_was_never_connected_fails(make_sender: MakeSender, receiver: Receiver) -> None:
    sender = make_sender()
    sender.obey(move(1, receiver, [1]))

    (failed,) = sender.reports.all
    assert isinstance(failed, MoveFailed)
    assert (failed.kind, failed.settled, failed.started) == ("connect", True, False)
    assert "no link to decode/0" in failed.message


def test_a_fence_of_an_unknown_peer_is_answered_at_once(make_sender: MakeSender) -> None:
    sender = make_sender()
    sender.obey(FencePeer("decode/7"), Revoke([1, 2]))

    assert sender.reports.all == [Fenced("decode/7", "")]


def test_a_move_after_a_fence_fails(make_sender: MakeSender, receiver: Receiver) -> None:
    sender = make_sender()
    sender.connect(receiver)
    sender.obey(FencePeer(receiver.peer), move(1, receiver, [1]))
    sender.reports.wait(MoveFailed)
    assert threads_end(receiver.peer)
    sender.obey(move(2, receiver, [1]), FencePeer(receiver.peer))

    for failed in sender.reports.wait(MoveFailed, count=2):
        assert (failed.kind, failed.settled, failed.started) == ("disconnected", True, False)
    assert sender.reports.wait(Fenced, count=2)[-1] == Fenced(receiver.peer, "")
    assert not receiver.pool.bytes.any()


def test_fenced_peers_are_forgotten(make_sender: MakeSender, make_receiver: MakeReceiver) -> None:
    """Each restart of a decode engine is a new peer: they must not pile up."""
    sender = make_sender()
    receiver = make_receiver()
    for round_ in range(20):
        command = receiver.connect()
        peer = f"decode/0#{round_}"
        sender.obey(type(command)(peer, command.endpoint, LAYOUT, 1, 0, PAGES), FencePeer(peer))
        sender.reports.wait(Fenced, count=round_ + 1)
        assert threads_end(peer)

    assert len(sender.host._lanes) == 1


# --- start and end -----------------------------------------------------------------------------


def test_a_pool_that_is_not_as_large_as_its_layout_says_is_refused(make_sender: MakeSender) -> None:
    sender = make_sender()
    host = WorkerHost(LoopbackBackend("x", {}), RankPool(LAYOUT, 1, 0, PAGES + 1), Budget(), print, print)
    with pytest.raises(PoolError, match=r"has 131072 bytes, 65 pages need 1 x 133120"):
        host.start([sender.pool.mapped.region])


def test_an_impossible_layout_is_refused(make_sender: MakeSender) -> None:
    sender = make_sender()
    odd = Layout(layers=1, page_tokens=8, kv_heads=3, head_size=64, dtype="bfloat16")
    host = WorkerHost(LoopbackBackend("x", {}), RankPool(odd, 2, 0, PAGES), Budget(), print, print)
    with pytest.raises(LayoutError, match="kv_heads is 3"):
        host.start([sender.pool.mapped.region])


def test_close_fences_every_peer_and_closes_the_backend(
    make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    backend = HandBackend()
    sender = make_sender(backend=backend)
    receivers = [make_receiver(f"decode/{rank}") for rank in range(3)]
    for receiver in receivers:
        sender.connect(receiver)

    assert sender.host.close(10)

    assert backend.closed
    assert all(link.fenced for link in backend.links)
    assert all(threads_of(receiver.peer) == 0 for receiver in receivers)
    sender.reports.wait(Fenced, count=3)
