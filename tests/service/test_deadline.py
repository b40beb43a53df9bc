"""What waits is bounded, from prefill-complete on and not before; under virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator.messages import Outcome, Progress, Released, Role
from tests.service.stage import VirtualStage, config, now_s, turns, virtual_time

if TYPE_CHECKING:
    from tests.service.peers import RankPeer

pytestmark = virtual_time


async def all_hear(ranks: list[RankPeer], room: int, reason: str) -> str:
    """Wait until every rank has heard of one and the same failure; returns its message."""
    outcomes = [await rank.outcome(room) for rank in ranks]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    failure = outcomes[0].failure
    assert failure is not None
    assert failure.reason == reason
    return failure.message


def heard_at(ranks: list[RankPeer], room: int, at_s: float) -> bool:
    """Whether every rank heard the verdict at this time, to 10 ms."""
    return all(abs(rank.when(Outcome, room) - at_s) < 0.01 for rank in ranks)


# --- when the clock starts -------------------------------------------------------------------


async def test_a_prefill_of_ten_minutes_is_no_wait() -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        prefill, decode, workers = await stage.pair(2)
        for rank in prefill:
            rank.open_room(7)
            rank.send_pages(7, 1, last=False)
        for rank in decode:
            rank.offer(7, 5, 6)
        await asyncio.sleep(600)
        for rank in prefill:
            rank.send_pages(7, 2)
        for rank in prefill + decode:
            assert (await rank.outcome(7)).succeeded
            rank.drain()
        assert sum(len(worker.moves()) for worker in workers) == 4
        await stage.empty()


async def test_no_clock_runs_before_prefill_completes() -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0, "offer_ttl_s": 100.0})) as stage:
        prefill, decode, _ = await stage.pair()
        prefill[0].open_room(7)
        decode[0].offer(7, 1)
        await asyncio.sleep(1200)
        assert 7 in stage.service.rooms.active
        prefill[0].send_pages(7, 1)
        assert (await decode[0].outcome(7)).succeeded


async def test_the_first_rank_that_is_complete_starts_the_clock() -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        prefill, decode, _ = await stage.pair(2)
        for rank in decode:
            rank.offer(7, 1)
        prefill[1].send_pages(7, 1)
        complete_s = now_s()
        await asyncio.sleep(30)
        prefill[0].send_pages(7, 1, last=False)
        message = await all_hear(prefill + decode, 7, "deadline")
        assert message == "waited 60.0 s after prefill for prefill-complete of p/0"
        assert heard_at(prefill + decode, 7, complete_s + 60)


# --- what is missing at the deadline ---------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 4])
async def test_an_offer_that_never_comes(world_size: int) -> None:
    """Case C12: decode dies before it offers; case C03: nothing else happens meanwhile."""
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        prefill, _, _ = await stage.pair(world_size)
        for rank in prefill:
            rank.send_pages(7, 1, 2)
        complete_s = now_s()
        message = await all_hear(prefill, 7, "deadline")
        assert message == "waited 60.0 s after prefill for the offer of any decode group"
        assert heard_at(prefill, 7, complete_s + 60)
        for rank in prefill:
            await rank.release(7)
            assert rank.when(Released, 7) == rank.when(Outcome, 7)
            rank.drain()
        await stage.empty()


async def test_an_offer_of_one_rank_that_never_comes_is_named() -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        prefill, decode, _ = await stage.pair(4)
        for rank in prefill:
            rank.send_pages(7, 1)
        complete_s = now_s()
        await turns()
        for rank in decode[:3]:
            rank.offer(7, 1)
        message = await all_hear(prefill + decode, 7, "deadline")
        assert message == "waited 60.0 s after prefill for the offer of d/3"
        assert heard_at(prefill + decode, 7, complete_s + 60)


@pytest.mark.parametrize("progress", [False, True])
async def test_a_transfer_that_never_completes(progress: bool) -> None:  # noqa: FBT001 - a parameter of pytest
    """Case C01: whether it gets on in between or not."""
    async with VirtualStage(
        config(handoff={"deadline_s": 60.0, "stall_s": 50.0 if progress else 600.0})
    ) as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        complete_s = now_s()
        workers[0].done(await workers[0].move())
        stuck = await workers[1].move()
        while progress and now_s() < complete_s + 59:
            workers[1].report(Progress([stuck.move]))
            await asyncio.sleep(7)
        message = await all_hear(prefill + decode, 7, "deadline")
        assert message == "waited 60.0 s after prefill for the leg p/1 -> d/1"
        assert heard_at(prefill + decode, 7, complete_s + 60)
        assert workers[1].revoked() == {stuck.move}
        assert not prefill[0].released(7)


async def test_a_worker_that_never_answers_costs_only_its_own_handoffs() -> None:
    """Case C04: it does not even introduce itself."""
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        prefill, decode, _ = await stage.pair()
        (mute,) = await stage.group(Role.PREFILL, "mute", 1)
        mute.send_pages(1, 1)
        decode[0].offer(1, 1)
        complete_s = now_s()
        for room in range(2, 60):
            prefill[0].send_pages(room, 1)
            decode[0].offer(room, 1)
            assert (await decode[0].outcome(room)).succeeded
            await asyncio.sleep(1)
        assert 1 in stage.service.rooms.active
        await all_hear([mute, decode[0]], 1, "deadline")
        assert heard_at([mute, decode[0]], 1, complete_s + 60)


async def test_a_worker_that_answers_nothing_any_more_costs_only_its_own_handoffs() -> None:
    """Case C04: it hangs after it has connected."""
    async with VirtualStage(config(handoff={"deadline_s": 60.0, "stall_s": 600.0})) as stage:
        prefill, decode, _ = await stage.pair()
        (mute,) = await stage.group(Role.PREFILL, "mute", 1)
        (worker,) = await stage.workers(auto=False)
        await worker.commanded()
        worker.connect_all()
        mute.send_pages(1, 1)
        decode[0].offer(1, 1)
        complete_s = now_s()
        await worker.move()
        prefill[0].send_pages(2, 1)
        decode[0].offer(2, 1)
        assert (await decode[0].outcome(2)).succeeded
        await all_hear([mute, decode[0]], 1, "deadline")
        assert heard_at([mute, decode[0]], 1, complete_s + 60)


# --- decode may ask for more time ------------------------------------------------------------


async def test_extend_moves_the_deadline_up_to_the_hard_cap() -> None:
    """Case C25: an overloaded decode says that the room is still in its queue."""
    async with VirtualStage(config(handoff={"deadline_s": 60.0, "hard_cap_s": 150.0})) as stage:
        prefill, decode, _ = await stage.pair()
        prefill[0].send_pages(7, 1)
        complete_s = now_s()
        for _ in range(3):
            await asyncio.sleep(49)
            decode[0].extend(7)
            await turns()
            assert 7 in stage.service.rooms.active
        assert "offer of d" in await all_hear(prefill + decode, 7, "deadline")
        assert heard_at(prefill + decode, 7, complete_s + 150)


async def test_extend_gives_the_full_bound_from_now_on() -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0, "hard_cap_s": 1000.0})) as stage:
        prefill, decode, _ = await stage.pair()
        prefill[0].send_pages(7, 1)
        complete_s = now_s()
        await asyncio.sleep(20)
        decode[0].extend(7)
        await all_hear(prefill + decode, 7, "deadline")
        assert heard_at(prefill + decode, 7, complete_s + 80)


async def test_extend_before_prefill_completes_changes_nothing() -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0, "hard_cap_s": 1000.0})) as stage:
        prefill, decode, _ = await stage.pair()
        decode[0].extend(7)
        prefill[0].open_room(7)
        await asyncio.sleep(100)
        prefill[0].send_pages(7, 1)
        complete_s = now_s()
        await all_hear(prefill + decode, 7, "deadline")
        assert heard_at(prefill + decode, 7, complete_s + 60)


async def test_an_offer_after_the_deadline_is_told_so_and_gets_no_data() -> None:
    """Case C25: prefill has given its pages away by now."""
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        prefill, decode, workers = await stage.pair(2)
        for rank in prefill:
            rank.send_pages(7, 1)
        await all_hear(prefill, 7, "deadline")
        for rank in prefill:
            rank.drain()
        await asyncio.sleep(100)
        assert not decode[0].events
        for rank in decode:
            rank.offer(7, 1)
        assert await all_hear(decode, 7, "deadline") == await all_hear(prefill, 7, "deadline")
        for rank in decode:
            await rank.release(7)
            rank.drain()
        await turns()
        assert not any(worker.moves() for worker in workers)
        assert all(len(rank.outcomes()) == 1 for rank in prefill)
        await stage.empty()


# --- decode without prefill ------------------------------------------------------------------


async def test_an_offer_without_any_sign_of_prefill_is_given_up() -> None:
    async with VirtualStage(config(handoff={"offer_ttl_s": 600.0})) as stage:
        prefill, decode, _ = await stage.pair(2)
        decode[0].offer(7, 1)
        offered_s = now_s()
        await asyncio.sleep(300)
        decode[1].offer(7, 1)
        message = await all_hear(decode, 7, "abandoned")
        assert message == "no sign of prefill for this room within 600 s of decode's first"
        assert heard_at(decode, 7, offered_s + 600)
        for rank in decode:
            await rank.release(7)
            rank.drain()
        # Prefill hears of it as soon as it speaks of the room, and need not wait for anything.
        prefill[1].open_room(7)
        spoke_s = now_s()
        await all_hear(prefill, 7, "abandoned")
        assert heard_at(prefill, 7, spoke_s)
        for rank in prefill:
            rank.drain()
        await stage.empty()


async def test_a_sign_of_prefill_in_time_keeps_the_offer() -> None:
    async with VirtualStage(config(handoff={"offer_ttl_s": 600.0})) as stage:
        prefill, decode, _ = await stage.pair()
        decode[0].offer(7, 1)
        await asyncio.sleep(599)
        prefill[0].open_room(7)
        await asyncio.sleep(1000)
        prefill[0].send_pages(7, 1)
        assert (await decode[0].outcome(7)).succeeded


# --- a leg that stops ------------------------------------------------------------------------


async def test_a_chunk_that_stalls_during_prefill_fails_its_handoff_alone() -> None:
    """Case C27: chunk 0 stalls during a prefill of 20 minutes; another one of 20 minutes gets on."""
    async with VirtualStage(config(handoff={"stall_s": 60.0})) as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        prefill[0].send_pages(1, 0, last=False)
        prefill[0].send_pages(2, 0, last=False)
        decode[0].offer(1, *range(40))
        decode[0].offer(2, *range(40))
        stuck, good = await worker.move(0), await worker.move(1)
        began_s = now_s()
        for chunk in range(1, 40):
            await asyncio.sleep(15)
            worker.report(Progress([good.move]))
            await asyncio.sleep(15)
            worker.done(good)
            if stuck.move in worker.revoked():
                worker.failed(stuck, "revoked")
            prefill[0].send_pages(2, chunk, last=chunk == 39)
            good = await worker.move(chunk + 1)
        message = await all_hear(prefill + decode, 1, "stalled")
        assert message == "p/0 -> d/0 made no progress for 60 s"
        assert heard_at(prefill + decode, 1, began_s + 60)
        assert now_s() - began_s > 1160
        worker.done(good)
        assert (await decode[0].outcome(2)).succeeded


async def test_a_leg_that_waits_for_its_connection_does_not_stall() -> None:
    async with VirtualStage(config(handoff={"stall_s": 10.0}, peer={"connect_s": 100.0})) as stage:
        prefill = await stage.group(Role.PREFILL, "p", 1)
        decode = await stage.group(Role.DECODE, "d", 1)
        (worker,) = await stage.workers(auto=False)
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        move = await worker.move()
        await asyncio.sleep(70)
        worker.connect_all()
        await asyncio.sleep(9)
        assert 7 in stage.service.rooms.active
        worker.done(move)
        assert (await decode[0].outcome(7)).succeeded


async def test_the_clock_of_a_leg_that_waited_starts_when_its_peer_is_connected() -> None:
    async with VirtualStage(config(handoff={"stall_s": 10.0}, peer={"connect_s": 100.0})) as stage:
        prefill = await stage.group(Role.PREFILL, "p", 1)
        decode = await stage.group(Role.DECODE, "d", 1)
        (worker,) = await stage.workers(auto=False)
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        await worker.move()
        await asyncio.sleep(70)
        worker.connect_all()
        await turns()
        connected_s = now_s()
        await all_hear(prefill + decode, 7, "stalled")
        assert heard_at(prefill + decode, 7, connected_s + 10)
