"""The queue between the host's thread and a lane's: order, turns, and who may fail a job."""

from __future__ import annotations

import threading
import time

import pytest

from coordinator.messages import ConnectPeer, FencePeer, Move, Revoke
from coordinator.worker import jobs as jobs_module
from coordinator.worker.jobs import JobQueue
from tests.worker.support import LAYOUT

CONNECT = ConnectPeer("decode/0", b"", LAYOUT, 1, 0, 1)


def a_move(number: int) -> Move:
    return Move(number, "decode/0", b"", b"")


@pytest.fixture
def queue() -> JobQueue:
    queue = JobQueue("decode/0")
    queue.put(CONNECT)
    return queue


def numbers(queue: JobQueue, link: int) -> list[int]:
    """Take what is ready for a link."""
    taken = []
    while job := queue.next(link):
        taken.append(job.move.move)
    return taken


def test_jobs_are_taken_in_order_and_those_with_more_to_post_go_behind(queue: JobQueue) -> None:
    for number in (1, 2):
        assert queue.add(a_move(number)) == ""
    first = queue.next(1)
    assert first is not None
    queue.again(first)

    assert numbers(queue, 1) == [2, 1]
    assert not queue.has_ready


def test_a_job_waits_for_the_connect_that_was_queued_before_it(queue: JobQueue) -> None:
    queue.add(a_move(1))
    queue.put(CONNECT)
    queue.add(a_move(2))

    assert numbers(queue, 1) == [1]
    assert [job.move.move for job in queue.take_all(1)] == [1]
    assert list(queue.notes(0.0)) == [CONNECT, CONNECT]
    assert numbers(queue, 2) == [2]


def test_a_job_that_nobody_took_is_dropped_and_one_that_was_taken_is_announced(
    queue: JobQueue,
) -> None:
    for number in (1, 2, 3):
        queue.add(a_move(number))
    queue.next(1)
    list(queue.notes(0.0))

    assert queue.revoke([1, 2, 9]) == [2]
    assert list(queue.notes(0.0)) == [Revoke([1])]
    assert numbers(queue, 1) == [3]
    assert queue.get(2) is None


def test_what_a_lane_that_hangs_never_takes_does_not_pile_up(queue: JobQueue) -> None:
    """Its moves come and are revoked at their deadlines; nobody else empties its queue."""
    for number in range(1, 4):
        queue.add(a_move(number))
    for number in range(4, 1000):
        queue.add(a_move(number))
        assert queue.revoke([number]) == [number]

    assert len(queue._ready) <= 2 * 3 + 1
    assert len(queue._notes) == 1
    assert numbers(queue, 1) == [1, 2, 3]


def test_jobs_keep_their_turns_whatever_is_revoked_among_them(queue: JobQueue) -> None:
    for number in range(100):
        queue.add(a_move(number))
    first = queue.next(1)
    assert first is not None
    queue.again(first)
    assert queue.revoke(range(1, 40)) == list(range(1, 40))
    assert [job.move.move for job in (queue.next(1), queue.next(1)) if job] == [40, 41]
    assert queue._dropped == 0, "what was passed over is not looked for again"
    assert queue.revoke(range(42, 98)) == list(range(42, 98))
    queue.add(a_move(100))

    assert numbers(queue, 1) == [98, 99, 0, 100]
    assert queue._dropped == 0


def test_many_deadlines_that_expire_together_cost_little_each(queue: JobQueue) -> None:
    """One by one: a queue that is gone through for each of them would take minutes."""
    count = 20_000
    for number in range(count):
        queue.add(a_move(number))
    began_s = time.monotonic()
    for number in range(count):
        queue.revoke([number])
    assert time.monotonic() - began_s < 5.0
    assert len(queue._ready) <= 1


def test_a_full_queue_refuses(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_JOBS", 2)
    queue.add(a_move(1))
    queue.add(a_move(2))
    assert queue.add(a_move(3)) == "2 moves to decode/0 are waiting already"


def test_it_closes_only_when_nothing_is_left_and_accepts_nothing_then(queue: JobQueue) -> None:
    assert not queue.close_if_empty()
    list(queue.notes(0.0))
    queue.add(a_move(1))
    list(queue.notes(0.0))
    assert not queue.close_if_empty()
    job = queue.next(1)
    assert job is not None
    queue.forget(job)

    assert queue.close_if_empty()
    assert queue.closed
    assert not queue.put(FencePeer("decode/0"))
    assert queue.add(a_move(2)) == "the link to decode/0 was fenced"


def test_notes_end_when_none_came_in_time(queue: JobQueue) -> None:
    assert list(queue.notes(0.0)) == [CONNECT]
    assert list(queue.notes(0.001)) == []
    assert not queue.has_notes


def test_a_wait_ends_also_when_its_time_is_over_before_it_has_begun() -> None:
    """A thread that had to wait for a core would never wake, and what it moves stand still."""
    queue, rounds = JobQueue("decode/0"), 20_000
    heard: list[object] = []

    def wait() -> None:
        for _ in range(rounds):
            queue.put(CONNECT)
            heard.extend([*queue.notes(1e-9), *queue.notes(1e-9)])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(30.0)
    assert len(heard) == rounds


@pytest.mark.parametrize("note", [FencePeer("decode/0"), None])
def test_a_note_ends_a_wait(queue: JobQueue, note: FencePeer | None) -> None:
    list(queue.notes(0.0))
    heard: list[object] = []
    thread = threading.Thread(target=lambda: heard.extend(queue.notes(None)), daemon=True)
    thread.start()
    if note is None:
        queue.add(a_move(1))
    else:
        queue.put(note)
    thread.join(30.0)
    assert heard == [note]
