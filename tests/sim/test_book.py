"""The driver's book: when a handoff is over, and what counts as disagreement."""

from __future__ import annotations

import pytest

from coordinator.sim.book import Book, Handoff, Party
from coordinator.sim.errors import SimulationError
from coordinator.sim.options import small_layout
from coordinator.sim.summary import Times, summarize
from coordinator.sim.wire import (
    Checkpoint,
    Ended,
    Freed,
    LastState,
    Refusal,
    Report,
    Reports,
    Request,
    Started,
)

PREFILL, DECODE = Party("prefill-0", 1, 2), Party("decode-0", 1, 2)
REQUEST = Request(room=7, pages=4, chunk_pages=2, prefix_pages=1)


def report(book: Book, party: Party, rank: int, *items: Report) -> None:
    book.record(party, Reports(party.group, rank, party.incarnation, list(items)))


def ended(reason: str = "", *, corrupt_pages: int = 0, seconds: float = -1.0) -> Ended:
    return Ended(7, 0, 1, reason, "why", corrupt_pages, seconds)


def begun() -> tuple[Book, Handoff]:
    book = Book()
    return book, book.begin(REQUEST, PREFILL, DECODE)


def test_a_handoff_is_over_when_every_rank_has_its_outcome_and_its_release() -> None:
    book, handoff = begun()
    for party in (PREFILL, DECODE):
        for rank in range(2):
            assert handoff.settled_s is None
            report(book, party, rank, ended(), Freed(7, 0))
    assert book.settled == [handoff]
    assert not book.open
    assert not book.disagreements


def test_what_is_missing_is_named() -> None:
    book, handoff = begun()
    for party, rank in ((PREFILL, 0), (PREFILL, 1), (DECODE, 0)):
        report(book, party, rank, ended(), Freed(7, 0))
    report(book, DECODE, 1, ended())
    assert handoff.missing() == "room 7: release at decode-0 #1 rank 1"


def test_a_killed_rank_owes_nothing_and_what_it_had_said_does_not_count() -> None:
    book, handoff = begun()
    for rank in range(2):
        report(book, PREFILL, rank, ended("peer_lost"), Freed(7, 0))
    book.lose(DECODE, [0, 1])
    assert book.settled == [handoff]
    assert handoff.untold, "its room is not used again: decode's next engine has not heard how it ended"
    report(book, DECODE, 0, ended(), Freed(7, 0))
    assert not book.disagreements


def test_a_handoff_is_in_flight_when_every_rank_has_started_it() -> None:
    book, handoff = begun()
    for party, rank in ((PREFILL, 0), (PREFILL, 1), (DECODE, 0)):
        report(book, party, rank, Started(7, 0))
        assert not handoff.in_flight
    report(book, DECODE, 1, Started(7, 0))
    assert handoff.in_flight
    report(book, PREFILL, 0, ended())
    assert not handoff.in_flight


@pytest.mark.parametrize(
    ("rank", "second", "complaint"),
    [
        (1, ended("deadline"), "has deadline, another rank has success"),
        (0, ended(), "had an outcome already"),
        (1, Freed(7, 1), "a handoff that is over"),
    ],
    ids=["another outcome", "an outcome twice", "another use of the room"],
)
def test_disagreement_is_noticed(rank: int, second: Report, complaint: str) -> None:
    book, _ = begun()
    report(book, PREFILL, 0, ended())
    report(book, PREFILL, rank, second)
    assert len(book.disagreements) == 1
    assert complaint in book.disagreements[0]


def test_an_outcome_after_the_end_is_a_disagreement() -> None:
    book, _ = begun()
    for party in (PREFILL, DECODE):
        for rank in range(2):
            report(book, party, rank, ended(), Freed(7, 0))
    report(book, DECODE, 0, ended("stalled"))
    assert "a handoff that is over" in book.disagreements[0]


def test_digests_are_compared_step_by_step() -> None:
    book, _ = begun()
    report(book, PREFILL, 0, Checkpoint(32, b"a"), Checkpoint(64, b"b"))
    report(book, PREFILL, 1, Checkpoint(32, b"a"))
    report(book, DECODE, 1, Checkpoint(64, b"x"))
    assert not book.disagreements
    report(book, PREFILL, 1, Checkpoint(64, b"c"))
    assert book.disagreements == ["prefill-0 #1: ranks [0, 1] are not alike after step 64"]


def test_a_room_cannot_be_begun_twice() -> None:
    book, _ = begun()
    with pytest.raises(SimulationError, match="room 7 is still in use"):
        book.begin(REQUEST, PREFILL, DECODE)


def test_last_states_are_kept() -> None:
    book, _ = begun()
    report(book, DECODE, 1, LastState(5, [7], 0))
    assert book.finals == {DECODE: {1: LastState(5, [7], 0)}}


class TestSummary:
    def sum_up(self, book: Book, **times: float) -> dict[str, object]:
        self.summary = summarize(book, "loopback", small_layout(2), 2, Times(10.0, 14.0, **times), [])
        return self.summary.as_json()

    def test_a_good_run(self) -> None:
        book, _ = begun()
        for party in (PREFILL, DECODE):
            for rank in range(2):
                seconds = 0.1 * (rank + 1) if party is PREFILL else -1.0
                report(book, party, rank, ended(seconds=seconds), Freed(7, 0))
        assert self.sum_up(book, killed_s=11.0, healed_s=12.5) == {
            "backend": "loopback",
            "handoffs": 1,
            "succeeded": 1,
            "failed": {},
            "unresolved": 0,
            "corrupt_pages": 0,
            # 3 pages behind the prefix, 8 planes of 2 KiB, 2 ranks.
            "bytes_moved": 3 * 8 * 2048 * 2,
            "seconds": 4.0,
            "p50_ms": 200.0,
            "p99_ms": 200.0,
            "heal_s": 1.5,
            "ranks_agree": True,
        }
        assert self.summary.ok

    def test_failures_are_counted_by_reason_and_are_no_problem(self) -> None:
        book, _ = begun()
        for rank in range(2):
            report(book, PREFILL, rank, ended("peer_lost"), Freed(7, 0))
        book.lose(DECODE, [0, 1])
        figures = self.sum_up(book)
        assert figures["failed"] == {"peer_lost": 1}
        assert figures["p50_ms"] is None
        assert figures["heal_s"] is None
        assert self.summary.ok

    def test_what_is_unresolved_is_a_problem(self) -> None:
        book, _ = begun()
        assert self.sum_up(book)["unresolved"] == 1
        assert not self.summary.ok
        assert "outcome at decode-0 #1 rank 0" in self.summary.problems[0]

    def test_a_corrupt_page_is_a_problem(self) -> None:
        book, _ = begun()
        for party in (PREFILL, DECODE):
            for rank in range(2):
                report(book, party, rank, ended(corrupt_pages=int(party is DECODE)), Freed(7, 0))
        assert self.sum_up(book)["corrupt_pages"] == 2
        assert not self.summary.ok

    def test_a_disagreement_is_a_problem(self) -> None:
        book, _ = begun()
        for party in (PREFILL, DECODE):
            for rank in range(2):
                report(book, party, rank, ended("" if rank else "stalled"), Freed(7, 0))
        assert self.sum_up(book)["ranks_agree"] is False
        assert not self.summary.ok

    def test_a_refusal_is_a_problem(self) -> None:
        book = Book()
        report(book, PREFILL, 0, Refusal(7, "no"))
        self.sum_up(book)
        assert self.summary.problems == ("the coordinator refused: prefill-0 #1 rank 0, room 7: no",)
