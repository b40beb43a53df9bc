"""Moves and the ways they take: connecting, failing, coming back; workers that die."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator.messages import (
    Connected,
    ConnectFailed,
    ConnectPeer,
    Fenced,
    FencePeer,
    Move,
    MoveDone,
    MoveFailed,
    MoveSettled,
    Outcome,
    Progress,
    Released,
    Role,
)
from tests.service.peers import WorkerPeer, pool
from tests.service.stage import Stage, VirtualStage, config, now_s, turns, virtual_time
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from tests.service.peers import RankPeer

pytestmark = virtual_time


async def hand_over(prefill: list[RankPeer], decode: list[RankPeer], room: int) -> Outcome:
    """One handoff from the first word to the verdict."""
    for rank in decode:
        rank.offer(room, 1)
    for rank in prefill:
        rank.send_pages(room, 1)
    return await decode[0].outcome(room)


async def apart(stage: Stage, world_size: int = 1) -> tuple[list[RankPeer], list[RankPeer], list[WorkerPeer]]:
    """Two groups and workers that were told to connect and have not answered."""
    prefill = await stage.group(Role.PREFILL, "p", world_size)
    decode = await stage.group(Role.DECODE, "d", world_size)
    workers = await stage.workers(auto=False)
    for worker in workers:
        await worker.commanded()
    return prefill, decode, workers


# --- connecting ------------------------------------------------------------------------------


async def test_connecting_has_a_budget_of_its_own() -> None:
    """Cases C26 and C15: a handshake that takes its time, and one that never ends."""
    async with VirtualStage(config(peer={"connect_s": 60.0}, handoff={"stall_s": 5.0})) as stage:
        prefill, decode, (worker,) = await apart(stage)
        began_s = now_s()
        for room in (1, 2):
            prefill[0].send_pages(room, 1)
            decode[0].offer(room, 1)
        for rank in prefill + decode:
            for room in (1, 2):
                assert await rank.failure(room) == "connect"
                assert rank.when(Outcome, room) == pytest.approx(began_s + 60, abs=0.5)
        for move in worker.moves():
            worker.failed(move, "revoked", started=False)
        worker.connect_all()
        worker.auto = True
        assert (await hand_over(prefill, decode, 3)).succeeded
        counters = stage.service.counters
        assert (counters.connect_failures, counters.connects, counters.reconnects) == (1, 1, 0)
        for rank in prefill + decode:
            rank.drain()
        await stage.empty()


async def test_a_peer_that_cannot_be_reached_is_tried_again_ever_more_rarely() -> None:
    """Case C09: one connect at a time, with backoff."""
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await apart(stage)
        (peer,) = {command.peer for command in worker.commands if isinstance(command, ConnectPeer)}
        pauses = []
        for _ in range(7):
            failed_s, seen = now_s(), len(worker.commands)
            worker.report(ConnectFailed(peer, "no route to host"))
            await worker.commanded(seen + 1)
            assert worker.commands[-1] == worker.commands[0]
            pauses.append(worker.commanded_at_s[-1] - failed_s)
        assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 8, 8], abs=0.01)
        worker.report(ConnectFailed(peer, "no route to host"))
        await turns()
        # In the pause, a handoff fails at once: it may go elsewhere.
        asked_s = now_s()
        outcome = await hand_over(prefill, decode, 1)
        assert outcome.failure is not None
        assert outcome.failure.reason == "connect"
        assert outcome.failure.message == "p/0 -> d/0 is down: no route to host"
        assert now_s() == asked_s
        await worker.commanded(9)
        worker.auto = True
        worker.connect_all()
        await turns()
        assert (await hand_over(prefill, decode, 2)).succeeded


async def test_many_handoffs_at_once_to_a_new_peer_connect_once() -> None:
    """Case C09."""
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await apart(stage)
        for room in range(1, 51):
            prefill[0].send_pages(room, 1)
            decode[0].offer(room, 1)
        await worker.move(49)
        worker.connect_all()
        for move in worker.moves():
            worker.done(move)
        for room in range(1, 51):
            assert (await decode[0].outcome(room)).succeeded
        assert len(worker.of(ConnectPeer)) == 1


async def test_what_is_over_before_the_peer_is_connected_is_not_posted() -> None:
    """Case C20: it is revoked, before the connection is there."""
    async with VirtualStage(config(handoff={"deadline_s": 30.0})) as stage:
        prefill, decode, (worker,) = await apart(stage)
        outcome = await hand_over(prefill, decode, 1)
        assert outcome.failure is not None
        assert outcome.failure.reason == "deadline"
        await worker.commanded(3)
        assert worker.revoked() == {move.move for move in worker.moves()}
        assert not decode[0].released(1)
        worker.failed(worker.moves()[0], "revoked", started=False)
        worker.connect_all()
        await decode[0].release(1)
        await prefill[0].release(1)


async def test_what_is_over_before_the_worker_is_up_never_reaches_it() -> None:
    """Case C20. Its pages are quiet at once, and the worker is left in peace."""
    async with VirtualStage() as stage:
        prefill = await stage.group(Role.PREFILL, "p", 1)
        decode = await stage.group(Role.DECODE, "d", 1)
        for room in range(1, 11):
            prefill[0].send_pages(room, 1)
            decode[0].offer(room, 1)
        await eventually_async(lambda: len(stage.service.transfers.flights) == 10)
        cancelled_s = now_s()
        for room in range(1, 11):
            decode[0].cancel(room)
        for rank in prefill + decode:
            for room in range(1, 11):
                await rank.release(room)
                assert rank.when(Released, room) == cancelled_s
            rank.drain()
        await stage.empty()
        await asyncio.sleep(60)
        assert not stage.worker(prefill[0]).killed
        (worker,) = await stage.workers()
        assert (await hand_over(prefill, decode, 11)).succeeded
        assert len(worker.moves()) == 1


# --- failing ---------------------------------------------------------------------------------


async def test_one_leg_of_four_that_cannot_be_posted_is_told_to_every_rank_at_once() -> None:
    """Case C06."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(4, auto=False)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        moves = [await worker.move() for worker in workers]
        posted_s = now_s()
        workers[2].failed(moves[2], started=False)
        outcomes = [await rank.outcome(7) for rank in prefill + decode]
        assert now_s() - posted_s < 0.01
        assert all(outcome == outcomes[0] for outcome in outcomes)
        failure = outcomes[0].failure
        assert failure is not None
        assert (failure.reason, failure.origin) == ("transport", "d/2")
        assert failure.message == "p/2 -> d/2: as the test says"
        for worker, move in zip(workers, moves, strict=True):
            await turns()
            assert worker.revoked() == (set() if worker is workers[2] else {move.move})


async def test_one_failed_send_to_a_healthy_peer_costs_one_handoff() -> None:
    """Case C11."""
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        for room in (1, 2):
            prefill[0].send_pages(room, 1)
            decode[0].offer(room, 1)
        worker.failed(await worker.move(0))
        assert await decode[0].failure(1) == "transport"
        worker.done(await worker.move(1))
        assert (await decode[0].outcome(2)).succeeded
        worker.auto = True
        assert (await hand_over(prefill, decode, 3)).succeeded
        assert not worker.of(ConnectPeer)
        assert not worker.of(FencePeer)


async def test_a_broken_line_is_connected_anew() -> None:
    """Case C10."""
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        for room in (1, 2):
            prefill[0].send_pages(room, 1)
            decode[0].offer(room, 1)
        for index in (0, 1):
            worker.failed(await worker.move(index), "disconnected")
        for room in (1, 2):
            assert await decode[0].failure(room) == "transport"
        await eventually_async(lambda: worker.of(ConnectPeer))
        worker.auto = True
        worker.connect_all()
        await turns()
        assert (await hand_over(prefill, decode, 3)).succeeded
        assert len(worker.of(ConnectPeer)) == 1


async def test_of_a_line_that_broke_with_its_process_the_process_is_told() -> None:
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        move = await worker.move()
        member = stage.member(decode[0])
        looked_at = []

        def confirm_alive(rank: object) -> bool:
            looked_at.append(rank)
            stage.died(decode[0])
            return False

        stage.service.transfers.confirm_alive = confirm_alive
        worker.failed(move, "disconnected")
        assert await prefill[0].failure(7) == "peer_lost"
        assert looked_at == [member]
        await prefill[0].release(7)
        prefill[0].drain()
        await stage.empty()


async def test_a_decode_rank_that_was_silent_for_a_while_is_connected_anew() -> None:
    """Its link was destroyed meanwhile, to make the pages of its last handoff quiet."""
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        prefill[0].send_pages(1, 1)
        decode[0].offer(1, 1)
        move = await worker.move()
        decode[0].stop()
        assert await prefill[0].failure(1) == "peer_lost"
        await eventually_async(lambda: worker.of(FencePeer), 30)
        worker.failed(move, "disconnected")
        worker.report(Fenced(worker.of(FencePeer)[0].peer))
        await prefill[0].release(1)
        await asyncio.sleep(60)
        worker.forget_commands()
        worker.auto = True
        decode[0].resume()
        await eventually_async(lambda: worker.of(ConnectPeer))
        await decode[0].release(1)
        decode[0].drain()
        prefill[0].drain()
        assert (await hand_over(prefill, decode, 2)).succeeded


async def test_the_link_to_a_lost_decode_rank_is_freed_without_any_traffic() -> None:
    """Case C16. When it comes back, it is connected anew."""
    async with VirtualStage(config(rank={"lost_after_s": 15.0})) as stage:
        prefill, decode, (worker,) = await stage.pair()
        worker.forget_commands()
        decode[0].stop()
        await asyncio.sleep(20)
        assert [type(command) for command in worker.commands] == [FencePeer]
        decode[0].resume()
        await eventually_async(lambda: worker.of(ConnectPeer))
        await turns()
        assert (await hand_over(prefill, decode, 1)).succeeded
        assert [type(command) for command in worker.commands] == [FencePeer, ConnectPeer, Move]


async def test_a_lost_decode_rank_is_not_connected_to() -> None:
    async with VirtualStage() as stage:
        _, decode, (worker,) = await apart(stage)
        (connect,) = worker.of(ConnectPeer)
        decode[0].leave()
        await turns()
        worker.report(ConnectFailed(connect.peer, "no route to host"))
        await asyncio.sleep(60)
        assert [type(command) for command in worker.commands] == [ConnectPeer, FencePeer]


async def test_a_decode_rank_that_was_silent_while_it_was_connected_gets_a_new_budget() -> None:
    async with VirtualStage(config(peer={"connect_s": 30.0})) as stage:
        prefill, decode, _ = await apart(stage)
        decode[0].stop()
        await asyncio.sleep(100)
        decode[0].resume()
        returned_s = now_s()
        await turns()
        outcome = await hand_over(prefill, decode, 1)
        assert outcome.failure is not None
        assert outcome.failure.reason == "connect"
        assert now_s() == pytest.approx(returned_s + 30, abs=0.5)


# --- workers that die ------------------------------------------------------------------------


async def test_a_worker_that_dies_costs_its_moves_and_nothing_else() -> None:
    """Case C08."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        workers[1].auto = True
        for rank in decode:
            rank.offer(1, 1)
        for rank in prefill:
            rank.send_pages(1, 1)
        await workers[0].move()
        stage.worker(prefill[0]).die("killed by signal 11")
        for rank in prefill + decode:
            outcome = await rank.outcome(1)
            assert outcome.failure is not None
            assert outcome.failure.reason == "transport"
            assert outcome.failure.message == "the worker of p/0 died: killed by signal 11"
            rank.drain()
        # What comes while it is down waits for its next life.
        for rank in decode:
            rank.offer(2, 1)
        for rank in prefill:
            rank.send_pages(2, 1)
        await asyncio.sleep(1)
        (reborn,) = await stage.workers()
        for rank in prefill + decode:
            assert (await rank.outcome(2)).succeeded
            await rank.release(1)
            rank.drain()
        assert [type(command) for command in reborn.commands] == [ConnectPeer, Move]
        assert stage.service.counters.worker_deaths == 1
        await stage.empty()


async def test_moves_that_wait_for_a_worker_end_with_its_life() -> None:
    async with VirtualStage() as stage:
        prefill = await stage.group(Role.PREFILL, "p", 1)
        decode = await stage.group(Role.DECODE, "d", 1)
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        await eventually_async(lambda: stage.service.transfers.flights)
        stage.worker(prefill[0]).die("exit code 1 (crashed)")
        for rank in prefill + decode:
            assert await rank.failure(7) == "transport"
            # Nothing of them was ever sent: there is nothing to wait for.
            await rank.release(7)
            assert rank.when(Released, 7) == rank.when(Outcome, 7)
            rank.drain()
        await stage.empty()


async def test_without_a_worker_for_good_handoffs_fail_at_once() -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair()
        stage.worker(prefill[0]).die("exit code 4 (backend)", hopeless=True)
        began_s = now_s()
        outcome = await hand_over(prefill, decode, 7)
        assert now_s() - began_s < 0.1
        assert outcome.failure is not None
        assert outcome.failure.reason == "internal"
        assert outcome.failure.message == "the worker of p/0 cannot run: exit code 4 (backend)"


# --- reports that fit nothing ----------------------------------------------------------------


async def test_reports_of_moves_that_are_unknown_or_of_another_worker_change_nothing() -> None:
    async with VirtualStage(config(handoff={"stall_s": 10.0})) as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        ours, theirs = await workers[0].move(), await workers[1].move()
        began_s = now_s()
        for number in (0, 999_999, 2**64 - 1, theirs.move):
            workers[0].report(
                MoveSettled(number),
                MoveFailed(number, "transport", "none of ours", settled=True, started=True),
                MoveDone(number, 1, 1.0),
                Progress([number]),
            )
        workers[0].report(
            Connected("nobody", 1.0),
            ConnectFailed("nobody", "why"),
            Fenced("nobody"),
            Fenced("nobody", "why"),
        )
        workers[0].report(MoveSettled(ours.move), Progress([ours.move, ours.move]))
        await turns()
        assert 7 in stage.service.rooms.active
        workers[0].done(ours)
        while now_s() < began_s + 9:
            await asyncio.sleep(1)
            workers[0].report(Progress([theirs.move]))
        assert await prefill[0].failure(7) == "stalled"
        assert now_s() == pytest.approx(began_s + 10, abs=0.1)


async def test_what_a_worker_reports_twice_counts_once() -> None:
    """Case C34: completions are counted by move, not by message."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        move = await workers[0].move()
        for _ in range(3):
            workers[0].done(move)
        await turns()
        assert 7 in stage.service.rooms.active
        workers[1].done(await workers[1].move())
        assert (await decode[0].outcome(7)).succeeded


async def test_success_that_is_reported_after_the_failure_is_late() -> None:
    """Case C37: it stays Failed; the late success is counted and logged, and frees the pages."""
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        move = await worker.move()
        decode[0].cancel(7, "the client has gone")
        assert await prefill[0].failure(7) == "cancelled_by_decode"
        await turns()
        assert not prefill[0].released(7)
        worker.done(move)
        for rank in prefill + decode:
            await rank.release(7)
            assert len(rank.outcomes(7)) == 1
            rank.drain()
        assert stage.service.counters.late["moved"] == 1
        assert stage.service.counters.succeeded == 0
        await stage.empty()


async def test_a_move_of_any_size_reaches_the_worker() -> None:
    """Case C49: many long page lists at once are several messages."""
    async with VirtualStage() as stage:
        count = 2**17
        (prefill,) = await stage.group(Role.PREFILL, "p", 1, pool=pool(count))
        (decode,) = await stage.group(Role.DECODE, "d", 1, pool=pool(count))
        numbers = range(count)
        for room in range(1, 11):
            prefill.send_pages(room, *numbers)
            decode.offer(room, *numbers)
        await eventually_async(lambda: len(stage.service.transfers.flights) == 10)
        (worker,) = await stage.workers()
        for room in range(1, 11):
            assert (await decode.outcome(room)).succeeded
        assert worker.largest_bytes < 8 << 20


async def test_a_fence_for_a_new_endpoint_that_is_not_answered_fails_what_waits_for_it() -> None:
    """Cases C04 and C27: the worker hangs in a native call, and prefill is not complete yet."""
    async with VirtualStage(config(handoff={"stall_s": 10.0}, peer={"connect_s": 10.0})) as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        for room in (7, 8):
            if room == 8:
                stage.service.moved(stage.member(decode[0]))
                await turns()
                assert worker.of(FencePeer)
            decode[0].offer(room, 1, 2)
            prefill[0].send_pages(room, 1, last=False)
        for room in (7, 8):
            for rank in prefill + decode:
                assert await rank.failure(room) == "connect"
