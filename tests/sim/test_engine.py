"""The ranks of an engine: what a step makes them do, and that a rank that does otherwise is found."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.layout import Layout
from coordinator.messages import Refused, Released
from coordinator.sim.decode import DecodeEngine
from coordinator.sim.engine import Sabotage
from coordinator.sim.errors import SimulationError
from coordinator.sim.pattern import Section, aux_of, sections_of
from coordinator.sim.prefill import PrefillEngine
from coordinator.sim.wire import (
    Checkpoint,
    Completed,
    Ended,
    Freed,
    LastState,
    Refusal,
    Request,
    Started,
    Step,
)
from tests.sim.stand_in import StandIn, failure, head, move, success

PAGES = 8
LAYOUT = Layout(layers=1, page_tokens=2, kv_heads=1, head_size=16, dtype="uint8")


def memory() -> list[Section]:
    return sections_of([np.zeros(LAYOUT.pool_bytes(PAGES, 1), dtype=np.uint8)], LAYOUT, 1, 0, PAGES)


class Pair:
    """One prefill and one decode rank, and what lies between them."""

    def __init__(self, sabotage: Sabotage = Sabotage.NONE) -> None:
        self.source, self.target = memory(), memory()
        self.prefill_client, self.decode_client = StandIn(), StandIn()
        self.prefill = PrefillEngine(self.prefill_client, self.source, rank=0)
        self.decode = DecodeEngine(self.decode_client, self.target, sabotage)
        self.step = 0

    def send(self, request: Request) -> None:
        """Compute, offer and move a request; the outcome is still to come."""
        self.step += 1
        self.decode.apply(Step(self.step, head(0), [request]))
        self.prefill.apply(Step(self.step, head(0), [request]))
        while self.prefill.busy:
            self.step += 1
            self.prefill.apply(Step(self.step, head(0)))
        move(request.room, self.prefill_client, self.source, self.decode_client, self.target)

    def end(self, request: Request, aux: bytes | None = None) -> Ended:
        """Let the decode rank hear of the success; what it reports."""
        aux = aux_of(request.room, request.generation) if aux is None else aux
        self.decode_client.events = success(request.room, aux=aux)
        ended, freed = self.decode.apply(Step(self.step + 1, head(2)))
        assert isinstance(ended, Ended)
        assert freed == Freed(request.room, request.generation)
        return ended


def test_prefill_sends_each_chunk_as_soon_as_it_is_computed() -> None:
    client = StandIn()
    engine = PrefillEngine(client, memory(), rank=0)
    request = Request(room=7, pages=5, chunk_pages=2, chunk_steps=2)
    said = [engine.apply(Step(number, head(0), [request] if number == 1 else [])) for number in range(1, 8)]
    assert client.opened == [7]
    assert [chunk.size for chunk in client.sent[7]] == [2, 2, 1]
    assert np.unique(np.concatenate(client.sent[7])).size == 5
    assert said == [[], [Started(7, 0)], [], [], [], [Completed(7, 0)], []]
    assert client.aux == {7: aux_of(7, 0)}


def test_only_rank_0_sends_side_data() -> None:
    client = StandIn()
    PrefillEngine(client, memory(), rank=1).apply(Step(1, head(0), [Request(7, pages=1, chunk_pages=1)]))
    assert client.aux == {7: b""}


@pytest.mark.parametrize("prefix_pages", [0, 2, 5], ids=["no prefix", "a prefix", "every page"])
def test_what_was_moved_is_right(prefix_pages: int) -> None:
    pair = Pair()
    request = Request(7, pages=5, chunk_pages=2, prefix_pages=prefix_pages)
    pair.send(request)
    assert pair.end(request).corrupt_pages == 0


def test_a_page_that_did_not_arrive_is_counted() -> None:
    pair = Pair()
    request = Request(7, pages=5, chunk_pages=2)
    pair.send(request)
    pages, _ = pair.decode_client.offered[7]
    pair.target[0].words[1, pages[3]] = 0
    assert pair.end(request).corrupt_pages == 1


def test_a_rank_that_spoils_a_page_on_purpose_is_found() -> None:
    pair = Pair(Sabotage.CORRUPT_PAGE)
    request = Request(7, pages=5, chunk_pages=2)
    pair.send(request)
    assert pair.end(request).corrupt_pages == 1


def test_wrong_side_data_spoil_every_page() -> None:
    pair = Pair()
    request = Request(7, pages=5, chunk_pages=2)
    pair.send(request)
    assert pair.end(request, aux=aux_of(7, 1)).corrupt_pages == 5


def test_requests_wait_for_pages_in_order() -> None:
    client = StandIn()
    engine = DecodeEngine(client, memory())
    requests = [Request(room, pages, chunk_pages=1) for room, pages in ((1, 6), (2, 4), (3, 2))]
    engine.apply(Step(1, head(0), requests))
    # Room 3 would fit, but came after room 2.
    assert list(client.offered) == [1]
    client.events = success(1)
    engine.apply(Step(2, head(2)))
    assert list(client.offered) == [1, 2, 3]


def test_pages_are_kept_until_they_are_released() -> None:
    client = StandIn()
    engine = DecodeEngine(client, memory())
    engine.apply(Step(1, head(0), [Request(1, PAGES, chunk_pages=1), Request(2, PAGES, chunk_pages=1)]))
    client.events = [failure(1), Released(1, 1)]
    ended = engine.apply(Step(2, head(1)))
    assert ended == [Ended(1, 0, 1, "peer_lost", "decode-0/1: its process has ended")]
    assert list(client.offered) == [1]
    assert engine.apply(Step(3, head(2)))[0] == Freed(1, 0)
    assert list(client.offered) == [1, 2]


def test_a_room_may_end_while_it_is_computed_or_still_waits() -> None:
    client = StandIn()
    engine = PrefillEngine(client, memory(), rank=0)
    engine.apply(Step(1, head(0), [Request(1, PAGES, chunk_pages=1), Request(2, 1, chunk_pages=1)]))
    client.events = [failure(2), Released(2, 1), failure(1), Released(1, 1)]
    engine.apply(Step(2, head(4)))
    assert not engine.busy
    _, last = engine.apply(Step(3, head(4), last=True))
    assert last == LastState(free_pages=PAGES, held=[], strays=0)


def test_a_room_may_be_used_again_while_its_old_pages_are_held() -> None:
    client = StandIn()
    engine = DecodeEngine(client, memory())
    engine.apply(Step(1, head(0), [Request(1, 2, chunk_pages=1)]))
    client.events = [failure(1), Released(1, 1), *success(1, attempt=2, aux=aux_of(1, 1))]
    engine.apply(Step(2, head(1), [Request(1, 2, chunk_pages=1, generation=1)]))
    assert engine.apply(Step(3, head(2))) == [Freed(1, 0)]
    ended, freed = engine.apply(Step(4, head(4)))
    assert isinstance(ended, Ended)
    assert ended.attempt == 2
    assert freed == Freed(1, 1)


def test_a_room_in_use_cannot_be_submitted_again() -> None:
    engine = DecodeEngine(StandIn(), memory())
    with pytest.raises(SimulationError, match="room 1 was submitted again"):
        engine.apply(Step(1, head(0), [Request(1, 1, chunk_pages=1), Request(1, 1, chunk_pages=1)]))


def test_only_rooms_without_an_outcome_are_cancelled() -> None:
    client = StandIn()
    engine = DecodeEngine(client, memory())
    engine.apply(Step(1, head(0), [Request(room, 1, chunk_pages=1) for room in (1, 2)]))
    client.events = success(1)
    engine.apply(Step(2, head(2), cancels=[(1, "why"), (2, "why"), (3, "why")]))
    assert client.cancelled == [(2, "why")]


def final_digest(engine: DecodeEngine, step: Step) -> bytes:
    *_, checkpoint, last = engine.apply(step)
    assert isinstance(last, LastState)
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint.digest


def test_events_of_an_earlier_incarnation_change_nothing_that_ranks_must_agree_on() -> None:
    fresh, joined_earlier = StandIn(), StandIn(events=success(99))
    digests = [
        final_digest(DecodeEngine(client, memory()), Step(1, head(len(client.events)), last=True))
        for client in (fresh, joined_earlier)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("sabotage", "alike"),
    [(Sabotage.NONE, True), (Sabotage.SKIP_RELEASE, False), (Sabotage.SKIP_OUTCOME, False)],
)
def test_a_rank_that_applies_something_else_has_another_digest(sabotage: Sabotage, *, alike: bool) -> None:
    digests = set()
    for fault in (Sabotage.NONE, sabotage):
        client = StandIn(events=[failure(1), Released(1, 1), failure(2), Released(2, 1)])
        engine = DecodeEngine(client, memory(), fault)
        engine.apply(Step(1, head(0), [Request(room, 2, chunk_pages=1) for room in (1, 2)]))
        digests.add(final_digest(engine, Step(2, head(4), last=True)))
    assert (len(digests) == 1) is alike


def test_the_order_of_events_is_part_of_the_digest() -> None:
    digests = set()
    for events in ([failure(1), failure(2)], [failure(2), failure(1)]):
        engine = DecodeEngine(StandIn(events=list(events)), memory())
        engine.apply(Step(1, head(0), [Request(room, 2, chunk_pages=1) for room in (1, 2)]))
        digests.add(final_digest(engine, Step(2, head(2), last=True)))
    assert len(digests) == 2


def test_what_the_coordinator_refuses_is_reported() -> None:
    client = StandIn(refused=[Refused("room", "room 7 is not yours", room=7)])
    first, *_ = DecodeEngine(client, memory()).apply(Step(1, head(0), last=True))
    assert first == Refusal(7, "room 7 is not yours")


def test_decode_holds_the_pages_for_as_long_as_the_answer_takes_and_then_admits_who_waits() -> None:
    client = StandIn()
    engine = DecodeEngine(client, memory())
    first = Request(1, PAGES, chunk_pages=1, prefix_pages=PAGES, answer_steps=2)
    engine.apply(Step(1, head(0), [first, Request(2, 1, chunk_pages=1)]))
    client.events = success(1, aux=aux_of(1, 0))
    assert not engine.busy
    (ended,) = engine.apply(Step(2, head(2)))
    assert isinstance(ended, Ended)
    assert ended.corrupt_pages == 0
    assert 2 not in client.offered
    # The answer is complete in this step, and the pages go to the next room at once.
    assert engine.apply(Step(3, head(2))) == [Freed(1, 0), Started(2, 0)]
    assert 2 in client.offered
    assert not engine.busy
