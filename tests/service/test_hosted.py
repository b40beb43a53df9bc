"""Workers in their ranks' own processes: told by ``Welcome``, never killed, believed; under virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator.messages import (
    VERSION,
    Fenced,
    FencePeer,
    Held,
    Memory,
    Reports,
    Role,
    WorkerBye,
    WorkerHello,
    encode,
)
from coordinator.worker.hosted import HostedWorker
from coordinator.worker.supervisor import START_S, WorkerState
from tests.service.peers import Peer, RankPeer, WorkerPeer
from tests.service.stage import VirtualStage, config, now_s, turns, virtual_time
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from coordinator.messages import Move
    from tests.service.stage import Stage

pytestmark = virtual_time

SETTLE_S = 5.0
DRAIN_S = 2.0
BOUNDS = config(release={"settle_s": SETTLE_S, "drain_s": DRAIN_S}, rank={"lost_after_s": 15.0})


def stage() -> VirtualStage:
    """A coordinator whose prefill ranks run their workers themselves."""
    return VirtualStage(BOUNDS, hire=HostedWorker)


def worker_of(stage: Stage, rank: RankPeer) -> HostedWorker:
    """The worker of a rank, as the coordinator sees it."""
    worker = stage.service.transfers.crews[stage.member(rank)].worker
    assert isinstance(worker, HostedWorker)
    return worker


async def cancelled(stage: Stage) -> tuple[RankPeer, RankPeer, WorkerPeer, Move]:
    """A handoff of room 7, cancelled while its one move is with the worker."""
    prefill, decode, (worker,) = await stage.pair(auto=False)
    decode[0].offer(7, 1)
    prefill[0].send_pages(7, 1)
    move = await worker.move()
    decode[0].cancel(7)
    await prefill[0].outcome(7)
    await decode[0].outcome(7)
    return prefill[0], decode[0], worker, move


def said_bye(worker: WorkerPeer, why: str = "it was told to end") -> None:
    """Let a worker say that nothing of it moves any more."""
    worker.send(WorkerBye(worker.worker.token, why))


async def test_a_rank_is_told_what_its_worker_must_know_and_the_same_each_time() -> None:
    async with stage() as here:
        prefill, decode, _ = await here.pair()
        orders = prefill[0].orders
        assert orders is not None
        assert orders.token == worker_of(here, prefill[0]).token
        assert (orders.backend, orders.options) == ("loopback", {})
        assert orders.heartbeat_s == here.config.rank.heartbeat_s
        prefill[0].again()
        await eventually_async(lambda: prefill[0].welcomed == 2)
        assert prefill[0].orders == orders
        assert decode[0].orders is None


async def test_pages_move_and_come_back() -> None:
    async with stage() as here:
        prefill, decode, _ = await here.pair()
        decode[0].offer(7, 1)
        prefill[0].send_pages(7, 1)
        assert (await decode[0].outcome(7)).succeeded
        await prefill[0].release(7)
        await decode[0].release(7)


async def test_what_does_not_end_is_fenced_and_then_held_until_its_process_is_dead() -> None:
    """Case C23: the ladder has no last rung here, because nobody kills an engine."""
    async with stage() as here:
        prefill, decode, worker, _ = await cancelled(here)
        await asyncio.sleep(600)
        assert worker.of(FencePeer)
        assert not prefill.released(7)
        assert not decode.released(7)
        (held,) = here.service.rooms.unreleased
        assert held.machine.held == ("prefill", "decode")
        died_s = now_s()
        here.died(prefill)
        await decode.release(7)
        assert now_s() >= died_s + DRAIN_S
        await eventually_async(lambda: not here.service.transfers.crews)


async def test_a_life_that_begins_anew_proves_that_the_former_one_is_quiet() -> None:
    async with stage() as here:
        prefill, decode, worker, _ = await cancelled(here)
        await turns()
        assert not prefill.released(7)
        anew = WorkerPeer(here, worker.worker, auto=True)
        await anew.join()
        await prefill.release(7)
        await decode.release(7)
        prefill.drain()
        decode.drain()
        await turns()
        # The former line is nobody's any more.
        malformed = here.service.counters.malformed
        worker.report()
        await eventually_async(lambda: here.service.counters.malformed == malformed + 1)
        decode.offer(8, 1)
        prefill.send_pages(8, 1)
        assert (await decode.outcome(8)).succeeded
        assert len(anew.moves()) == 1


async def test_a_worker_that_cannot_run_fails_handoffs_at_once_and_says_why() -> None:
    async with stage() as here:
        prefill = await here.group(Role.PREFILL, "p", 1)
        decode = await here.group(Role.DECODE, "d", 1)
        decode[0].offer(7, 1)
        prefill[0].send_pages(7, 1)
        await turns()
        peer = Peer(here)
        peer.open()
        peer.send(WorkerBye(worker_of(here, prefill[0]).token, "there is no engine"))
        verdict = await prefill[0].outcome(7)
        assert verdict.failure is not None
        assert "there is no engine" in verdict.failure.message
        await prefill[0].release(7)
        for rank in (prefill[0], decode[0]):
            rank.drain()
        decode[0].offer(8, 1)
        prefill[0].send_pages(8, 1)
        assert await decode[0].failure(8) == "internal"
        # It comes after all.
        (worker,) = [WorkerPeer(here, worker_of(here, prefill[0]), auto=True)]
        await worker.join()
        for rank in (prefill[0], decode[0]):
            rank.drain()
        decode[0].offer(9, 1)
        prefill[0].send_pages(9, 1)
        assert (await decode[0].outcome(9)).succeeded


async def test_each_life_dies_once() -> None:
    """It says so itself, or begins anew, or its process ends: whatever comes first."""
    async with stage() as here:
        prefill, _, (worker,) = await here.pair()
        counters, hosted = here.service.counters, worker.worker
        said_bye(worker)
        await eventually_async(lambda: hosted.hopeless)
        assert counters.worker_deaths == 1
        assert hosted.identity is None, "it gets no more commands"
        assert hosted.state is WorkerState.DOWN
        second = WorkerPeer(here, hosted, auto=True)
        await second.join()
        assert counters.worker_deaths == 1
        third = WorkerPeer(here, hosted, auto=True)
        await third.join()
        assert counters.worker_deaths == 2
        said_bye(third)
        await eventually_async(lambda: hosted.hopeless)
        here.died(prefill[0])
        await turns()
        assert counters.worker_deaths == 3


async def test_a_worker_that_never_comes_is_not_waited_for() -> None:
    async with stage() as here:
        prefill = await here.group(Role.PREFILL, "p", 1)
        decode = await here.group(Role.DECODE, "d", 1)
        decode[0].offer(7, 1)
        prefill[0].send_pages(7, 1)
        verdict = await prefill[0].outcome(7)
        assert now_s() == pytest.approx(START_S, abs=1)
        assert verdict.failure is not None
        assert "did not introduce itself within 120 s" in verdict.failure.message
        assert here.service.counters.worker_deaths == 0
        await decode[0].release(7)


async def test_a_worker_that_never_comes_is_not_missed_once_it_is_forgotten() -> None:
    async with stage() as here:
        prefill = await here.group(Role.PREFILL, "p", 1)
        worker = worker_of(here, prefill[0])
        await worker.stop()
        await asyncio.sleep(2 * START_S)
        assert worker.state is WorkerState.STOPPED
        assert worker.trouble == ""


async def test_a_new_process_in_the_place_proves_nothing_of_the_former_one() -> None:
    """It may only be stopped, and go on to write: decode's pages wait for its worker's last word."""
    async with stage() as here:
        prefill, decode, worker, _ = await cancelled(here)
        prefill.stop()
        successor = RankPeer(here, Role.PREFILL, "p", 0, 1)
        await successor.join()
        while not successor.welcomed:
            await asyncio.sleep(1)
            successor.again()
            await turns()
        assert successor.orders is not None
        assert successor.orders.token != worker.worker.token
        await asyncio.sleep(600)
        assert not decode.released(7)
        assert len(here.service.transfers.crews) == 2
        said_bye(worker)
        await decode.release(7)
        await eventually_async(lambda: len(here.service.transfers.crews) == 1)


async def test_a_rank_that_is_gone_with_nothing_moving_leaves_nothing_behind() -> None:
    async with stage() as here:
        prefill, _, _ = await here.pair()
        prefill[0].stop()
        successor = RankPeer(here, Role.PREFILL, "p", 0, 1)
        await successor.join()
        while not successor.welcomed:
            await asyncio.sleep(1)
            successor.again()
            await turns()
        await eventually_async(lambda: len(here.service.transfers.crews) == 1)
        assert here.member(successor) in here.service.transfers.crews


async def test_commands_that_cannot_be_told_cut_the_life_short() -> None:
    async with stage() as here:
        prefill, decode, _, _ = await cancelled(here)
        crew = here.service.transfers.crews[here.member(prefill)]
        crew.commands._send = lambda _: False
        decode.drain()
        prefill.drain()
        decode.offer(8, 1)
        prefill.send_pages(8, 1)
        hosted = worker_of(here, prefill)
        await eventually_async(lambda: hosted.identity is None)
        assert hosted.state is WorkerState.DOWN
        crew.commands._send = here.service._send
        # It is refused at its next word, fences its links and begins anew.
        anew = WorkerPeer(here, hosted, auto=True)
        await anew.join()
        assert await prefill.failure(8) == "transport"
        for room in (7, 8):
            await prefill.release(room)
            await decode.release(room)


async def test_an_unknown_worker_is_told_so_without_alarm() -> None:
    """A worker outlives its coordinator, and meets the next one before its rank is told of it."""
    async with stage() as here:
        stranger = Peer(here)
        stranger.open()
        stranger.send(encode(WorkerHello(VERSION, 32 * b"x", 1)))
        assert (await stranger.refusal()).code == "unknown"
        assert here.service.counters.malformed == 0
        stranger.send(encode(WorkerBye(32 * b"x", "whatever")))
        stranger.send(encode(Reports([])))
        assert (await stranger.refusal()).code == "malformed"


async def test_after_a_restart_decode_s_pages_wait_for_the_workers_that_outlived_it() -> None:
    """They are fenced when they introduce themselves, however long that takes; then decode drains."""
    async with stage() as here:
        memory = Memory([], [Held(7, 0, 0)], [])
        prefill = RankPeer(here, Role.PREFILL, "p", 0, 1, epoch=99, memory=memory)
        decode = RankPeer(here, Role.DECODE, "d", 0, 1, epoch=99, memory=memory)
        for rank in (prefill, decode):
            await rank.join()
        assert await prefill.failure(7) == "coordinator_restarted"
        assert await decode.failure(7) == "coordinator_restarted"
        await asyncio.sleep(100)
        assert not prefill.released(7)
        assert not decode.released(7)
        (worker,) = await here.workers()
        fenced_s = now_s()
        await prefill.release(7)
        assert now_s() < fenced_s + DRAIN_S
        await decode.release(7)
        assert now_s() >= fenced_s + DRAIN_S
        assert worker.worker.state is WorkerState.UP


async def test_a_fence_that_failed_is_tried_again() -> None:
    """Case C11: nobody can kill the worker, and the pair is apart until its link is fenced after all."""
    async with stage() as here:
        prefill, decode, worker, move = await cancelled(here)
        await eventually_async(lambda: worker.of(FencePeer), 2 * SETTLE_S)
        worker.report(Fenced(worker.of(FencePeer)[0].peer, "1 transfers did not settle"))
        await turns()
        worker.failed(move, "transport", started=True)
        await eventually_async(lambda: len(worker.of(FencePeer)) == 2, 5.0)
        worker.report(Fenced(worker.of(FencePeer)[1].peer))
        await turns()
        worker.connect_all()
        for rank in (prefill, decode):
            await rank.release(7)
            rank.drain()
        decode.offer(8, 1)
        prefill.send_pages(8, 1)
        worker.done(await worker.move(1))
        assert (await prefill.outcome(8)).succeeded
