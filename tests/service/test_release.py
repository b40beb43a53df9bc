"""Pages are released when they are quiet, and never before; under virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator.messages import Fenced, FencePeer, MoveSettled, Outcome, Released
from tests.service.stage import VirtualStage, config, now_s, turns, virtual_time
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from coordinator.messages import Move
    from tests.service.peers import RankPeer, WorkerPeer
    from tests.service.stage import Stage

pytestmark = virtual_time

SETTLE_S = 5.0
DRAIN_S = 2.0
#: With the two heartbeats that a stop may take unnoticed, the next one, and the next look.
DRAINED_S = DRAIN_S + 2.0 + 1.25
BOUNDS = config(release={"settle_s": SETTLE_S, "drain_s": DRAIN_S})


async def under_way(stage: Stage) -> tuple[RankPeer, RankPeer, WorkerPeer, Move]:
    """A handoff of room 7 whose one move is with the worker."""
    prefill, decode, (worker,) = await stage.pair(auto=False)
    decode[0].offer(7, 1)
    prefill[0].send_pages(7, 1)
    return prefill[0], decode[0], worker, await worker.move()


async def cancelled(stage: Stage) -> tuple[RankPeer, RankPeer, WorkerPeer, Move, float]:
    """The same, cancelled while it moves; and when that was."""
    prefill, decode, worker, move = await under_way(stage)
    decode.cancel(7)
    await prefill.outcome(7)
    await decode.outcome(7)
    await turns()
    assert not prefill.released(7)
    assert not decode.released(7)
    return prefill, decode, worker, move, now_s()


def fences(worker: WorkerPeer) -> list[float]:
    """When the worker was told to destroy a link."""
    return [
        at_s
        for command, at_s in zip(worker.commands, worker.commanded_at_s, strict=True)
        if isinstance(command, FencePeer)
    ]


# --- what is quiet when ----------------------------------------------------------------------


async def test_a_success_releases_both_sides_with_the_verdict() -> None:
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move = await under_way(stage)
        worker.done(move)
        for rank in (prefill, decode):
            await rank.release(7)
            assert rank.when(Released, 7) == rank.when(Outcome, 7)
            rank.drain()
        await stage.empty()


async def test_a_move_that_never_started_leaves_nothing_to_wait_for() -> None:
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move, over_s = await cancelled(stage)
        worker.failed(move, "revoked", started=False)
        for rank in (prefill, decode):
            await rank.release(7)
            assert rank.when(Released, 7) == over_s
            rank.drain()
        await stage.empty()


async def test_the_source_is_quiet_when_its_move_is_settled_the_destination_after_the_drain() -> None:
    """Case C17: what decode cancelled may still be written until then."""
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move, over_s = await cancelled(stage)
        await asyncio.sleep(2)
        worker.failed(move, "transport", settled=False)
        await asyncio.sleep(2)
        assert not prefill.released(7)
        worker.report(MoveSettled(move.move))
        await prefill.release(7)
        assert prefill.when(Released, 7) == pytest.approx(over_s + 4, abs=0.01)
        await decode.release(7)
        assert over_s + 4 + DRAIN_S <= decode.when(Released, 7) <= over_s + 4 + DRAINED_S
        await turns()
        waits = stage.service.counters.release_s
        assert waits.count == 1
        assert waits.sum_s == pytest.approx(decode.when(Released, 7) - over_s, abs=0.01)
        for rank in (prefill, decode):
            rank.drain()
        await stage.empty()
        assert not fences(worker)


async def test_what_cannot_land_any_more_needs_no_drain() -> None:
    """A backend may promise that a settled move is settled at both ends."""
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move = await under_way(stage)
        worker.worker.lands_after_settled = False
        worker.failed(move)
        for rank in (prefill, decode):
            await rank.release(7)
            assert rank.when(Released, 7) == rank.when(Outcome, 7)
            rank.drain()
        await stage.empty()


async def test_both_sides_are_told_once_after_two_ranks_gave_up_with_chunks_outstanding() -> None:
    """Case C18, and case C19: one move has ended, the other one has not."""
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for rank in decode:
            rank.offer(7, 1, 2)
        for rank in prefill:
            rank.send_pages(7, 1, last=False)
            rank.send_pages(7, 2, last=False)
        moves = [(worker, await worker.move(index)) for worker in workers for index in (0, 1)]
        for rank in decode:
            rank.cancel(7)
        for rank in prefill + decode:
            await rank.outcome(7)
        for worker, move in moves[:3]:
            worker.failed(move, "revoked")
        await asyncio.sleep(4)
        assert not any(rank.released(7) for rank in prefill + decode)
        worker, move = moves[3]
        worker.done(move)
        for rank in prefill + decode:
            await rank.release(7)
            assert len(rank.events) == 2
            rank.drain()
        await stage.empty()


async def test_two_decode_ranks_gave_up_and_one_of_them_stands_still() -> None:
    """Case C18: the source is quiet when its chunks are; decode, as a whole, when both ranks have drained."""
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for rank in decode:
            rank.offer(7, 1, 2)
        for rank in prefill:
            rank.send_pages(7, 1, last=False)
            rank.send_pages(7, 2, last=False)
        moves = [(worker, await worker.move(index)) for worker in workers for index in (0, 1)]
        for rank in decode:
            rank.cancel(7)
        for rank in prefill + decode:
            await rank.outcome(7)
        decode[1].stop()
        for worker, move in moves:
            assert not any(rank.released(7) for rank in prefill + decode)
            worker.failed(move, "transport")
        quiet_s = now_s()
        for rank in prefill:
            await rank.release(7)
            assert rank.when(Released, 7) == quiet_s
        await asyncio.sleep(10)
        assert not decode[0].released(7)
        resumed_s = now_s()
        decode[1].resume()
        for rank in decode:
            await rank.release(7)
            assert resumed_s + DRAIN_S <= rank.when(Released, 7) <= resumed_s + DRAINED_S
        for rank in prefill + decode:
            assert len(rank.events) == 2
            rank.drain()
        await stage.empty()


# --- the ladder ------------------------------------------------------------------------------


async def test_what_does_not_end_by_itself_is_fenced_then_killed() -> None:
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move, over_s = await cancelled(stage)
        process = stage.worker(prefill)
        await asyncio.sleep(SETTLE_S + 1)
        assert fences(worker) == [pytest.approx(over_s + SETTLE_S, abs=0.01)]
        assert not process.killed
        await prefill.release(7)
        assert prefill.when(Released, 7) == pytest.approx(over_s + 2 * SETTLE_S, abs=0.01)
        assert process.killed == ["a move of room 7 cannot be made quiet in another way"]
        await decode.release(7)
        assert decode.when(Released, 7) >= over_s + 2 * SETTLE_S + DRAIN_S
        assert move.move in worker.revoked()
        (reborn,) = await stage.workers()
        prefill.drain()
        decode.drain()
        decode.offer(8, 1)
        prefill.send_pages(8, 1)
        assert (await decode.outcome(8)).succeeded
        assert len(reborn.moves()) == 1
        for rank in (prefill, decode):
            rank.drain()
        await stage.empty()


async def test_a_fence_that_works_needs_no_kill_and_the_peer_is_connected_anew() -> None:
    """Case C11: the fenced peer is readmitted within seconds."""
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move, over_s = await cancelled(stage)
        await eventually_async(lambda: fences(worker), 10)
        worker.failed(move, "disconnected")
        worker.report(Fenced(move.peer))
        await prefill.release(7)
        await decode.release(7)
        assert now_s() - over_s < SETTLE_S + DRAINED_S
        assert not stage.worker(prefill).killed
        worker.auto = True
        worker.connect_all()
        prefill.drain()
        decode.drain()
        await turns()
        decode.offer(8, 1)
        prefill.send_pages(8, 1)
        assert (await decode.outcome(8)).succeeded


async def test_a_fence_that_does_not_work_is_followed_by_the_kill_at_once() -> None:
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move, over_s = await cancelled(stage)
        await eventually_async(lambda: fences(worker), 10)
        fenced_s = now_s()
        worker.report(Fenced(move.peer, "1 transfers did not settle"))
        await prefill.release(7)
        assert prefill.when(Released, 7) == pytest.approx(fenced_s, abs=0.01)
        assert stage.worker(prefill).killed == [
            "the link to d/0 cannot be fenced: 1 transfers did not settle"
        ]
        await decode.release(7)
        assert over_s < fenced_s


async def test_pages_are_held_for_ever_when_nothing_makes_them_quiet() -> None:
    """Case C23: a process that hangs in the kernel. Nobody else is harmed, and it is counted."""
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move = await under_way(stage)
        stage.worker(prefill).immortal = True
        decode.cancel(7)
        await prefill.outcome(7)
        await asyncio.sleep(600)
        assert stage.worker(prefill).killed
        assert not prefill.released(7)
        assert not decode.released(7)
        assert len(stage.service.releases) == 1
        (held,) = stage.service.rooms.unreleased
        assert held.machine.held == ("prefill", "decode")
        # It ends after all.
        worker.failed(move, "revoked")
        await prefill.release(7)
        await decode.release(7)
        for rank in (prefill, decode):
            rank.drain()
        await stage.empty()


async def test_the_ladder_does_not_delay_the_verdict_or_other_handoffs() -> None:
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move, _ = await cancelled(stage)
        prefill.drain()
        decode.drain()
        decode.offer(8, 2)
        prefill.send_pages(8, 2)
        began_s = now_s()
        worker.done(await worker.move(1))
        assert (await decode.outcome(8)).succeeded
        assert now_s() == pytest.approx(began_s, abs=0.1)
        # And the room may be used again while its last attempt is not quiet.
        decode.offer(7, 3)
        prefill.send_pages(7, 3)
        worker.done(await worker.move(2))
        assert (await decode.outcome(7, 2)).succeeded
        assert [event.attempt for event in decode.events if event.room == 7] == [1, 2, 2]
        worker.failed(move, "revoked", started=False)
        await decode.release(7, 1)


# --- the drain -------------------------------------------------------------------------------


async def test_no_destination_is_released_while_its_rank_is_silent() -> None:
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move = await under_way(stage)
        decode.stop()
        stopped_s = now_s()
        worker.failed(move)
        await prefill.release(7)
        assert prefill.when(Released, 7) == stopped_s
        await asyncio.sleep(10)
        assert await held_by_decode(stage)
        decode.resume()
        resumed_s = now_s()
        # What was in its buffers when it was stopped gets the same time as ever.
        await decode.release(7)
        assert decode.when(Released, 7) >= resumed_s + DRAIN_S
        assert decode.when(Released, 7) <= resumed_s + DRAINED_S


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("stopped_s", [0.5, 1.1, 1.9, 2.0, 2.1, 2.2, 2.4, 3.0])
async def test_a_short_stop_does_not_count_as_time_in_which_bytes_landed(
    stopped_s: float, after_s: float
) -> None:
    """Case C17: its first sign after a stop says that it runs now, not that it ran."""
    async with VirtualStage(BOUNDS) as stage:
        _, decode, worker, move = await under_way(stage)
        worker.failed(move)
        await asyncio.sleep(after_s)
        decode.stop()
        await asyncio.sleep(stopped_s)
        resumed_s = now_s()
        decode.resume()
        await decode.release(7)
        # What it did before the stop was as good.
        assert decode.when(Released, 7) >= resumed_s + DRAIN_S - after_s


async def test_no_destination_is_released_while_its_rank_is_lost_and_not_proven_dead() -> None:
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move = await under_way(stage)
        decode.stop()
        assert await prefill.failure(7) == "peer_lost"
        worker.failed(move, "revoked")
        await prefill.release(7)
        await asyncio.sleep(500)
        assert await held_by_decode(stage)
        decode.resume()
        resumed_s = now_s()
        await decode.release(7)
        assert decode.when(Released, 7) >= resumed_s + DRAIN_S
        for rank in (prefill, decode):
            rank.drain()
        await stage.empty()


async def test_pages_of_a_rank_that_is_not_waited_for_any_longer_are_not_released_to_it() -> None:
    """It is told to start anew: nobody can say what it has missed."""
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move = await under_way(stage)
        decode.stop()
        assert await prefill.failure(7) == "peer_lost"
        worker.failed(move, "revoked")
        await prefill.release(7)
        await asyncio.sleep(1000)
        assert not stage.service.membership.groups.get("d")
        decode.resume()
        refused = await decode.refused()
        assert refused.fatal
        assert refused.message == "d/0 was taken for dead, and its place was given up; restart it"
        assert await held_by_decode(stage)
        assert not decode.released(7)


async def test_a_rank_that_stops_again_and_again_is_given_the_time_in_one_piece() -> None:
    async with VirtualStage(BOUNDS) as stage:
        _, decode, worker, move = await under_way(stage)
        decode.stop()
        worker.failed(move)
        for _ in range(5):
            await asyncio.sleep(4)
            decode.resume()
            await asyncio.sleep(1)
            decode.stop()
        assert await held_by_decode(stage)
        decode.resume()
        await decode.release(7)


async def test_nothing_lands_in_a_rank_that_is_proven_dead() -> None:
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move = await under_way(stage)
        worker.failed(move)
        await prefill.release(7)
        assert await held_by_decode(stage)
        stage.died(decode)
        died_s = now_s()
        prefill.drain()
        await stage.empty()
        assert now_s() - died_s < 1.0


async def test_a_dead_decode_rank_leaves_only_the_source_to_be_made_quiet() -> None:
    """Case C07. The worker is told to destroy the link; that is the proof."""
    async with VirtualStage(BOUNDS) as stage:
        prefill, decode, worker, move = await under_way(stage)
        stage.died(decode)
        assert await prefill.failure(7) == "peer_lost"
        await eventually_async(lambda: fences(worker))
        assert not prefill.released(7)
        worker.failed(move, "disconnected")
        worker.report(Fenced(move.peer))
        await prefill.release(7)
        prefill.drain()
        await stage.empty()
        assert not stage.worker(prefill).killed


async def held_by_decode(stage: Stage) -> bool:
    """Whether one handoff is held, and by its destination alone."""
    await turns()
    (handoff,) = stage.service.rooms.unreleased
    handoff.machine.validate()
    return handoff.machine.held == ("decode",)
