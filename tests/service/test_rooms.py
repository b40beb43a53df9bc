"""Which attempt a message means, what is refused, and that a verdict is one and final."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator import endings
from coordinator.endings import Ended
from coordinator.layout import Layout
from coordinator.messages import Cancel, Extend, Item, Offer, Open, Outcome, Released, Role, Send
from tests.service.peers import PAGES, pages
from tests.service.stage import VirtualStage, config, now_s, turns, virtual_time
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from coordinator.messages import Event
    from tests.service.peers import RankPeer

pytestmark = virtual_time


def same(events: list[list[Event]]) -> bool:
    """Whether all ranks of a group heard the same."""
    return all(one == events[0] for one in events)


# --- room ids that are used twice ------------------------------------------------------------


async def test_a_verdict_is_not_for_an_engine_that_was_started_after_it() -> None:
    """Decode died before it spoke of the room; the next one uses the room anew, and speaks first."""
    async with VirtualStage() as stage:
        (prefill,), (old,), _ = await stage.pair()
        prefill.open_room(7)
        await turns()
        stage.died(old)
        prefill.cancel(7, "its decode engine was restarted")
        assert (await prefill.outcome(7)).failure
        await prefill.release(7)
        prefill.drain()
        await asyncio.sleep(1)
        (decode,) = await stage.group(Role.DECODE, "d", 1)
        decode.offer(7, 1)
        await turns()
        assert not decode.events, "it was not meant"
        prefill.send_pages(7, 1)
        for rank in (prefill, decode):
            assert (await rank.outcome(7, 2)).succeeded
            await rank.release(7, 2)
            rank.drain()
        await stage.empty()


async def test_a_verdict_is_for_an_engine_that_was_there_and_had_not_spoken_yet() -> None:
    async with VirtualStage() as stage:
        (prefill,), (decode,), _ = await stage.pair()
        prefill.open_room(7)
        prefill.cancel(7, "not wanted any more")
        assert (await prefill.outcome(7)).failure
        await asyncio.sleep(1)
        decode.offer(7, 1)
        outcome = await decode.outcome(7)
        assert outcome.failure is not None
        assert outcome.failure.reason == "cancelled_by_prefill"
        await decode.release(7)
        for rank in (prefill, decode):
            rank.drain()
        await stage.empty()


async def test_a_room_that_is_in_flight_is_refused_to_another_group() -> None:
    """Case C35: the newcomer is refused, the first is unaffected."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2)
        others = await stage.group(Role.PREFILL, "p2", 2)
        await stage.workers()
        for rank in prefill:
            rank.send_pages(7, 1)
        await turns()
        for rank in others:
            rank.send_pages(7, 2)
        for rank in others:
            outcome = await rank.outcome(7)
            assert outcome.failure is not None
            assert (outcome.failure.reason, outcome.failure.origin) == ("rejected", "p2/0")
            assert outcome.failure.message == (
                "room 7 is in flight with p; a room id must not be used twice at a time"
            )
            await rank.release(7)
            rank.drain()
        assert same([rank.events for rank in others])
        for rank in decode:
            rank.offer(7, 5)
        for rank in prefill + decode:
            assert (await rank.outcome(7)).succeeded
            rank.drain()
        assert all(move.source_pages == pages(1) for worker in workers for move in worker.moves())
        await stage.empty()


async def test_a_room_is_used_again_after_its_end() -> None:
    """Case C35: that is a new attempt, with the number 2."""
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(2)
        for attempt in (1, 2, 3):
            for rank in prefill:
                rank.send_pages(7, attempt)
            for rank in decode:
                rank.offer(7, 5)
            for rank in prefill + decode:
                assert (await rank.outcome(7, attempt)).succeeded
                rank.drain()
        assert [event.attempt for event in prefill[0].events] == [1, 1, 2, 2, 3, 3]
        await stage.empty()


async def test_what_was_said_before_the_verdict_was_drained_does_not_open_a_new_attempt() -> None:
    """Case C30: rank 1 speaks of attempt 1 while its verdict is on the way to it.

    Case C38: the room is used again meanwhile, and nothing of its last attempt counts for the new one.
    """
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2)
        prefill[0].send_pages(7, 1)
        prefill[0].cancel(7, "the client has gone")
        await prefill[0].outcome(7)
        prefill[0].drain()
        # The first rank goes on: attempt 2. The second one has not applied the end of attempt 1.
        prefill[0].send_pages(7, 2)
        prefill[1].send_pages(7, 1)
        prefill[1].cancel(7)
        await turns()
        assert stage.service.counters.late == {"send": 1, "cancel": 1}
        assert stage.service.rooms.active[7].machine.attempt == 2
        prefill[1].drain()
        prefill[1].send_pages(7, 3)
        for rank in decode:
            rank.offer(7, 5)
        # Decode did not take part in attempt 1; its offer came when it was over, and is told so.
        assert (await decode[0].outcome(7, 2)).succeeded
        assert [move.source_pages for move in workers[0].moves()] == [pages(2)]
        assert [move.source_pages for move in workers[1].moves()] == [pages(3)]
        assert same([rank.events for rank in prefill])


async def test_what_arrives_with_the_news_that_the_verdict_was_drained_was_said_before_it() -> None:
    """Case C30: the engine drains a verdict while its last words on the room are still in the queue.

    Taken for a new attempt, they would have its pages moved, which it has given to another room.
    """
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(1)
        rank = prefill[0]
        rank.send_pages(7, 1, last=False)
        rank.cancel(7)
        await rank.outcome(7)
        late = Send(7, 0, pages(2), last=True)
        rank.applied = rank.head
        # Over a gap it may not count either: what is missing was said before.
        rank.submit_from(len(rank.said) + 2)
        await turns()
        rank.submit(late)
        await turns()
        assert stage.service.counters.late == {"send": 1}
        assert not stage.service.rooms.active
        decode[0].offer(7, 5)
        assert await decode[0].failure(7) == "cancelled_by_prefill"
        # And now it has been drained.
        assert not stage.service.membership.groups["p"].ended
        rank.open_room(7)
        await turns()
        assert stage.service.rooms.active[7].machine.attempt == 2


async def test_a_rank_that_was_lost_and_comes_back_opens_no_attempt_with_old_words() -> None:
    async with VirtualStage() as stage:
        prefill, _, _ = await stage.pair(2)
        for rank in prefill:
            rank.open_room(7)
        await turns()
        prefill[1].stop()
        assert await prefill[0].failure(7) == "rank_lost"
        prefill[0].drain()
        await turns()
        prefill[0].cancel(8)
        await prefill[0].outcome(8)
        prefill[0].drain()
        await turns()
        opened = stage.service.counters.opened
        # In its queue from before; it has heard nothing since.
        prefill[1].submit(Send(7, 0, pages(1), last=True), Cancel(8, 0))
        prefill[1].resume()
        await prefill[1].outcome(8)
        await turns()
        assert stage.service.counters.opened == opened
        assert not stage.service.rooms.active
        assert same([rank.events for rank in prefill])
        prefill[1].drain()
        await stage.empty()


# --- what a rank may not say -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "item"),
    [
        (Role.PREFILL, Offer(7, 0, pages(1))),
        (Role.PREFILL, Extend(7, 0)),
        (Role.DECODE, Open(7, 0)),
        (Role.DECODE, Send(7, 0, pages(1), last=True)),
    ],
)
async def test_an_item_of_the_other_side_is_refused(role: Role, item: Item) -> None:
    async with VirtualStage() as stage:
        (rank,) = await stage.group(role, "g", 1)
        rank.submit(item)
        refused = await rank.refused()
        kind = type(item).__name__
        assert (refused.code, refused.room, refused.fatal) == (kind.lower(), 7, False)
        assert refused.message == f"a {role} rank cannot say {kind}"
        assert stage.service.counters.opened == 0
        rank.cancel(8)
        await rank.outcome(8)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (pages(PAGES), "page 64 is outside the pool of p/1, which has pages 0 to 63"),
        (pages(0, -1), "page -1 is outside the pool of p/1, which has pages 0 to 63"),
        (pages(2**31 - 1), "page 2147483647 is outside the pool of p/1, which has pages 0 to 63"),
        (pages(-(2**31)), "page -2147483648 is outside the pool of p/1, which has pages 0 to 63"),
        (b"\0\0\0", "3 bytes are no list of int32 page numbers"),
        (pages(1) * (PAGES + 1), "65 pages are more than the 64 of the pool of p/1"),
    ],
)
async def test_pages_that_are_none_fail_the_handoff_and_reach_no_worker(bad: bytes, problem: str) -> None:
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2)
        for rank in decode:
            rank.offer(7, *range(4))
        await turns()
        prefill[1].submit(Send(7, 0, bad, last=True))
        refused = await prefill[1].refused()
        assert (refused.code, refused.room, refused.message) == ("send", 7, f"room 7: {problem}")
        for rank in prefill + decode:
            outcome = await rank.outcome(7)
            assert outcome.failure is not None
            assert (outcome.failure.reason, outcome.failure.origin) == ("rejected", "p/1")
            assert outcome.failure.message == problem
            await rank.release(7)
            rank.drain()
        assert not any(worker.moves() for worker in workers)
        await stage.empty()


async def test_too_many_pages_in_several_chunks_are_too_many() -> None:
    async with VirtualStage() as stage:
        prefill, _, _ = await stage.pair()
        prefill[0].send_pages(7, *range(PAGES), last=False)
        prefill[0].send_pages(7, 0)
        assert (await prefill[0].refused()).message == (
            "room 7: 65 pages are more than the 64 of the pool of p/0"
        )
        assert await prefill[0].failure(7) == "rejected"


@pytest.mark.parametrize("bad", [pages(PAGES), pages(-1), b"\0\0\0\0\0", pages(1) * (PAGES + 1)])
async def test_an_offer_of_pages_that_are_none_fails_the_handoff(bad: bytes) -> None:
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair()
        prefill[0].send_pages(7, 1)
        decode[0].submit(Offer(7, 0, bad))
        assert (await decode[0].refused()).code == "offer"
        for rank in prefill + decode:
            assert await rank.failure(7) == "rejected"
        assert not workers[0].moves()


@pytest.mark.parametrize(
    ("sent", "offered", "prefix", "message"),
    [
        (2, 3, 0, "prefill rank 0 sent 2 pages, decode rank 0 offered 3 behind a prefix of 0"),
        (3, 2, 0, "prefill rank 0 sent 3 pages, decode rank 0 offered 2 behind a prefix of 0"),
        (2, 2, 1, "prefill rank 0 sent 2 pages, decode rank 0 offered 2 behind a prefix of 1"),
        (0, 1, 0, "prefill rank 0 sent 0 pages, decode rank 0 offered 1 behind a prefix of 0"),
        (
            1,
            0,
            2**31 - 1,
            "prefill rank 0 sent 1 pages, decode rank 0 offered 0 behind a prefix of 2147483647",
        ),
    ],
)
async def test_page_counts_that_do_not_match_fail_the_handoff(
    sent: int, offered: int, prefix: int, message: str
) -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair()
        decode[0].offer(7, *range(offered), prefix=prefix)
        prefill[0].send_pages(7, *range(sent))
        for rank in prefill + decode:
            outcome = await rank.outcome(7)
            assert outcome.failure is not None
            assert (outcome.failure.reason, outcome.failure.message) == ("rejected", f"room 7: {message}")


async def test_what_comes_after_the_last_chunk_is_refused_and_changes_nothing() -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair()
        prefill[0].send_pages(7, 1)
        prefill[0].send_pages(7, 2)
        assert (await prefill[0].refused()).message == "room 7: sent again after its last chunk"
        prefill[0].open_room(7)
        assert (await prefill[0].refused()).message == "room 7: opened after its last chunk"
        decode[0].offer(7, 5)
        assert (await decode[0].outcome(7)).succeeded


async def test_a_second_offer_is_refused_and_changes_nothing() -> None:
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair()
        decode[0].offer(7, 5)
        decode[0].offer(7, 6)
        assert (await decode[0].refused()).message == "room 7: offered twice"
        prefill[0].send_pages(7, 1)
        assert (await decode[0].outcome(7)).succeeded
        assert [move.destination_pages for move in worker.moves()] == [pages(5)]


async def test_groups_that_do_not_fit_each_other_fail_their_handoff_alone() -> None:
    """Case C47: one prefill group fits, so the decode group was let in; this one does not."""
    other = Layout(layers=2, page_tokens=32, kv_heads=8, head_size=8, dtype="float16")
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair()
        (odd_decode,) = await stage.group(Role.DECODE, "odd", 1)
        stage.service.membership.groups["odd"].layout = other
        prefill[0].send_pages(7, 1)
        odd_decode.offer(7, 1)
        for rank in (prefill[0], odd_decode):
            outcome = await rank.outcome(7)
            assert outcome.failure is not None
            assert outcome.failure.reason == "incompatible"
            assert outcome.failure.message == (
                "p and odd do not fit: page_tokens: prefill has 16, decode has 32"
            )
            await rank.release(7)
        prefill[0].send_pages(8, 1)
        decode[0].offer(8, 1)
        assert (await decode[0].outcome(8)).succeeded


# --- limits ----------------------------------------------------------------------------------


async def test_past_the_limit_of_handoffs_newcomers_fail_at_once_on_both_sides() -> None:
    async with VirtualStage(config(limits={"max_handoffs": 3})) as stage:
        prefill, decode, _ = await stage.pair()
        for room in (1, 2, 3, 4):
            prefill[0].open_room(room)
        outcome = await prefill[0].outcome(4)
        assert outcome.failure is not None
        assert outcome.failure.reason == "rejected"
        assert outcome.failure.message == "limits.max_handoffs = 3 handoffs are in flight"
        await prefill[0].release(4)
        # The other side need not wait for what cannot come.
        decode[0].offer(4, 1)
        assert await decode[0].failure(4) == "rejected"
        await decode[0].release(4)
        prefill[0].cancel(3)
        await prefill[0].outcome(3)
        prefill[0].drain()
        prefill[0].send_pages(4, 1)
        decode[0].drain()
        decode[0].offer(4, 1)
        assert (await decode[0].outcome(4, 2)).succeeded
        assert stage.service.counters.failed == {"rejected": 1, "cancelled_by_prefill": 1}


async def test_past_the_limit_of_offers_newcomers_fail_at_once() -> None:
    async with VirtualStage(config(limits={"max_offers": 2})) as stage:
        prefill, decode, _ = await stage.pair()
        for room in (1, 2, 3):
            decode[0].offer(room, 1)
        outcome = await decode[0].outcome(3)
        assert outcome.failure is not None
        assert outcome.failure.reason == "rejected"
        assert outcome.failure.message == "limits.max_offers = 2 offers wait for prefill already"
        assert stage.service.counters.late == {}
        prefill[0].send_pages(1, 1)
        assert (await decode[0].outcome(1)).succeeded
        decode[0].offer(4, 1)
        await turns()
        assert set(stage.service.rooms.active) == {2, 4}


# --- cancels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [False, True])
async def test_a_refusal_of_a_request_that_prefill_works_on_already(last: bool) -> None:  # noqa: FBT001 - of pytest
    """Case C22: decode has never offered pages for it, so nothing moves and nothing is waited for."""
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(2)
        for rank in prefill:
            rank.send_pages(7, 1, last=last)
        await turns()
        refused_s = now_s()
        decode[0].cancel(7, "no room for it")
        for rank in prefill + decode:
            assert await rank.failure(7) == "cancelled_by_decode"
            await rank.release(7)
            assert rank.when(Released, 7) == rank.when(Outcome, 7) == refused_s
            assert len(rank.events) == 2
        # An offer of the other rank, made before it heard of that, changes nothing.
        decode[1].offer(7, 1)
        await turns()
        for rank in prefill + decode:
            assert len(rank.events) == 2
            rank.drain()
        await stage.empty()


async def test_a_refusal_of_a_request_that_never_was_admitted() -> None:
    """Case C22: failed and released at once, on whichever side."""
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(2)
        asked_s = now_s()
        for rank in decode:
            rank.cancel(7, "no room for it")
        for rank in decode:
            outcome = await rank.outcome(7)
            assert outcome.failure is not None
            assert outcome.failure.reason == "cancelled_by_decode"
            assert (outcome.failure.origin, outcome.failure.message) == ("d/0", "no room for it")
            await rank.release(7)
            rank.drain()
        assert now_s() == asked_s
        for rank in prefill:
            rank.open_room(7)
        for rank in prefill:
            assert await rank.failure(7) == "cancelled_by_decode"
            await rank.release(7)
            rank.drain()
        assert now_s() == asked_s
        assert stage.service.counters.opened == 1
        await stage.empty()


async def test_an_error_of_one_rank_of_eight_is_told_to_all_with_its_cause() -> None:
    """Case C31."""
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(8)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.open_room(7)
        await turns()
        prefill[5].cancel(7, "CUDA error: an illegal memory access was encountered")
        outcomes = [await rank.outcome(7) for rank in prefill + decode]
        assert all(outcome == outcomes[0] for outcome in outcomes)
        failure = outcomes[0].failure
        assert failure is not None
        assert (failure.reason, failure.origin) == ("cancelled_by_prefill", "p/5")
        assert failure.message == "CUDA error: an illegal memory access was encountered"
        assert same([rank.events for rank in prefill])
        assert same([rank.events for rank in decode])


async def all_over(ranks: list[RankPeer], rooms: range, since_s: float) -> None:
    """Wait until every rank has heard a verdict for each room, all within two seconds."""
    for rank in ranks:
        await rank.heard(len(rooms), Outcome)
        assert {outcome.room for outcome in rank.outcomes()} == set(rooms)
    assert now_s() - since_s < 2.0


async def test_a_thousand_cancels_at_once_before_anything_moves() -> None:
    """Case C24: all have their verdict at once, and nothing is left of them."""
    rooms = range(1, 1001)
    async with VirtualStage() as stage:
        prefill, _, _ = await stage.pair(2)
        for room in rooms:
            for rank in prefill:
                rank.send_pages(room, 1)
        await eventually_async(lambda: len(stage.service.rooms.active) == len(rooms))
        asked_s = now_s()
        for room in rooms:
            prefill[room % 2].cancel(room)
        await all_over(prefill, rooms, asked_s)
        for rank in prefill:
            await rank.heard(len(rooms), Released)
            rank.drain()
        await stage.empty()
        assert stage.service.counters.failed == {"cancelled_by_prefill": len(rooms)}


async def test_a_thousand_cancels_at_once_while_all_of_them_move() -> None:
    """Case C24: and the same with pages that are not quiet yet."""
    rooms = range(1, 1001)
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        for room in rooms:
            prefill[0].send_pages(room, 1)
            decode[0].offer(room, 1)
        await worker.move(len(rooms) - 1)
        asked_s = now_s()
        for room in rooms:
            decode[0].cancel(room)
        await all_over(prefill + decode, rooms, asked_s)
        await eventually_async(lambda: worker.revoked() == {move.move for move in worker.moves()})
        assert not prefill[0].released(1)
        for move in worker.moves():
            worker.failed(move, "revoked", started=False)
        for rank in prefill + decode:
            await rank.heard(len(rooms), Released)
            rank.drain()
        await stage.empty()
        assert stage.service.counters.failed == {"cancelled_by_decode": len(rooms)}


async def test_a_cancel_of_what_is_over_is_late_or_refused() -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair()
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        await prefill[0].outcome(7)
        prefill[0].cancel(7)
        await turns()
        assert stage.service.counters.late == {"cancel": 1}
        assert not prefill[0].refusals
        prefill[0].drain()
        prefill[0].cancel(7)
        assert (await prefill[0].refused()).message == "room 7 is not in flight"
        assert len(prefill[0].outcomes()) == 1
        assert stage.service.counters.opened == 1


# --- what moves ------------------------------------------------------------------------------


async def test_decode_has_every_page_already() -> None:
    """Case C48: success without any transfer."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2)
        for rank in decode:
            rank.offer(7, prefix=3)
        for rank in prefill:
            rank.send_pages(7, 1, 2, 3, aux=b"token")
        for rank in prefill + decode:
            assert (await rank.outcome(7)).succeeded
            await rank.release(7)
            rank.drain()
        assert not any(worker.moves() for worker in workers)
        await stage.empty()


async def test_a_prefix_that_decode_has_is_not_moved() -> None:
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair()
        prefill[0].send_pages(7, 1, last=False)
        prefill[0].send_pages(7, 2, 3, last=False)
        decode[0].offer(7, 11, 12, prefix=2)
        prefill[0].send_pages(7, 4)
        assert (await decode[0].outcome(7)).succeeded
        assert [(move.source_pages, move.destination_pages) for move in worker.moves()] == [
            (pages(3), pages(11)),
            (pages(4), pages(12)),
        ]


async def test_an_empty_prompt_is_handed_over() -> None:
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair()
        decode[0].offer(7)
        prefill[0].send_pages(7, aux=b"token")
        assert (await decode[0].outcome(7)).aux == b"token"
        assert not worker.moves()


async def test_success_needs_every_rank_and_its_last_chunk() -> None:
    """Case C29: bytes that arrived are not enough."""
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(2)
        for rank in decode:
            rank.offer(7, 1)
        prefill[1].send_pages(7, 1)
        prefill[0].send_pages(7, 1, last=False)
        await asyncio.sleep(10)
        assert 7 in stage.service.rooms.active
        prefill[0].send_pages(7, last=True, aux=b"token")
        assert (await decode[1].outcome(7)).aux == b"token"


# --- the end of the service ------------------------------------------------------------------


async def test_while_draining_newcomers_are_told_and_the_rest_may_end() -> None:
    """Case C53."""
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair()
        prefill[0].send_pages(1, 1)
        prefill[0].send_pages(2, 1)
        await turns()
        ending = asyncio.ensure_future(stage.service.drain(30.0, asyncio.Event()))
        await turns()
        prefill[0].open_room(3)
        assert await prefill[0].failure(3) == "draining"
        decode[0].offer(3, 1)
        assert await decode[0].failure(3) == "draining"
        decode[0].offer(1, 1)
        assert (await decode[0].outcome(1)).succeeded
        began_s = now_s()
        assert await prefill[0].failure(2) == "draining"
        assert now_s() - began_s == pytest.approx(30, abs=0.5)
        await ending
        assert now_s() - began_s < 32


async def test_a_second_signal_cuts_the_grace_short() -> None:
    """Case C53."""
    async with VirtualStage() as stage:
        prefill, _, _ = await stage.pair()
        prefill[0].send_pages(1, 1)
        await turns()
        hurry = asyncio.Event()
        ending = asyncio.ensure_future(stage.service.drain(1000.0, hurry))
        await asyncio.sleep(5)
        assert not ending.done()
        hurry.set()
        await asyncio.wait_for(ending, 5)
        assert await prefill[0].failure(1) == "draining"


async def test_a_room_whose_pages_are_held_is_not_forgotten() -> None:
    """Else its next attempt would have the same number, and a release could mean either."""
    async with VirtualStage() as stage:
        (prefill,), (decode,), (worker,) = await stage.pair(auto=False)
        stage.worker(prefill).immortal = True
        moves = []
        for attempt in (1, 2):
            decode.offer(7, 1)
            prefill.send_pages(7, 1)
            moves.append(await worker.move(attempt - 1))
            decode.cancel(7)
            for rank in (prefill, decode):
                await rank.outcome(7, attempt)
                rank.drain()
            await turns()
            for room in range(100, 100 + 2 * endings.REMEMBERED):
                stage.service.rooms.endings.remember(room, Ended(1, None))
        assert len(stage.service.rooms.endings._ended) <= endings.REMEMBERED + 1
        for attempt, move in enumerate(moves, 1):
            assert not prefill.released(7)[attempt - 1 :]
            worker.failed(move, "transport", started=True)
            await prefill.release(7, attempt)
        prefill.drain()
        await asyncio.sleep(10)
        for room in range(100, 100 + 2 * endings.REMEMBERED):
            stage.service.rooms.endings.remember(room, Ended(1, None))
        assert stage.service.rooms.endings.get(7) is None, "nothing is held any more"
