"""An engine that has given up on its coordinator comes back as a later life; endpoints that move."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from coordinator.messages import (
    Connected,
    ConnectPeer,
    Fenced,
    FencePeer,
    Memory,
    Outcome,
    Process,
    Released,
    Role,
    WhoAreYou,
    decode_to_rank,
)
from tests.service.peers import Peer, RankPeer
from tests.service.stage import Stage, VirtualStage, config, now_s, turns, virtual_time
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from coordinator.groups import Group


def group(stage: Stage, name: str) -> Group:
    return stage.service.membership.groups[name]


async def later(stage: Stage, rank: RankPeer, life: int = 1, **changes: object) -> RankPeer:
    """Let the client in a rank's process start over."""
    hello = rank.hello
    peer = RankPeer(stage, hello.role, hello.group, hello.rank, hello.world_size, life=life, **changes)
    await peer.join()
    return peer


@virtual_time
async def test_the_whole_group_begins_anew() -> None:
    """Both sides hear of what fails; the later life hears of nothing of before, and is served at once."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        moves = [await worker.move() for worker in workers]
        # The other rank of the engine still says what it said before it followed.
        prefill[0].stop()
        asked_s = now_s()
        first = await later(stage, prefill[0])
        assert first.welcomed
        assert now_s() - asked_s < 1, "nobody is asked whether the former life lives"
        assert await decode[0].failure(7) == "rank_lost"
        for worker, move in zip(workers, moves, strict=True):
            worker.failed(move, "disconnected")
        prefill[1].send_pages(8, 1)
        await turns()
        prefill[1].stop()
        second = await later(stage, prefill[1])
        await eventually_async(lambda: group(stage, "p").ready)
        assert (first.base, second.base) == (0, 0)
        assert 8 not in stage.service.rooms.active, "a word of a former life opens nothing"
        for worker in await stage.workers():
            await worker.commanded()
        # The room is used again: its next attempt is this life's own.
        for rank in decode:
            rank.applied = rank.head
            rank.offer(7, 1)
        for rank in (first, second):
            rank.send_pages(7, 1)
        for rank in (first, second):
            assert (await rank.outcome(7, attempt=2)).succeeded
            assert [type(event) for event in rank.events] == [Outcome, Released]


async def test_a_decode_group_begins_anew() -> None:
    async with Stage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        decode[0].offer(7, 1)
        prefill[0].send_pages(7, 1)
        move = await worker.move()
        decode[0].stop()
        new = await later(stage, decode[0], endpoint=b"elsewhere")
        assert new.welcomed
        assert await prefill[0].failure(7) == "peer_restarted"
        await eventually_async(lambda: worker.of(FencePeer))
        worker.failed(move, "disconnected")
        await prefill[0].release(7)
        assert b"elsewhere" in {command.endpoint for command in worker.of(ConnectPeer)}
        assert not new.events


@virtual_time
async def test_a_newcomer_does_not_push_a_living_engine_out() -> None:
    """Another engine of the same name, which had lost a coordinator of its own."""
    async with VirtualStage() as stage:
        ranks = await stage.group(Role.DECODE, "d", 2)
        other = await later(stage, ranks[1], process=Process(2, "elsewhere", 0))
        assert (await other.refused()).code == "contested"
        assert all(rank.alive for rank in group(stage, "d").live)
        for rank in ranks:
            rank.stop()
        await asyncio.sleep(20)
        other.again()
        await eventually_async(lambda: other.welcomed)
        assert group(stage, "d").life == 1


async def test_a_rank_whose_own_former_life_is_not_known_waits_for_the_others() -> None:
    """A new coordinator had only heard of the other one."""
    async with Stage() as stage:
        second = RankPeer(stage, Role.DECODE, "d", 1, 2)
        await second.join()
        first = RankPeer(stage, Role.DECODE, "d", 0, 2, life=1)
        await first.join()
        assert (await first.refused()).code == "contested"
        assert group(stage, "d").ranks[0] is None
        second.stop()
        assert (await later(stage, second)).welcomed
        first.again()
        await eventually_async(lambda: group(stage, "d").ready)


async def test_a_former_life_is_told_that_it_is_over() -> None:
    """It may try again: its engine may be about to follow. A new process learns which life it is."""
    async with Stage() as stage:
        first, second = await stage.group(Role.DECODE, "d", 2)
        first.stop()
        await later(stage, first, life=3)
        for straggler in (second, RankPeer(stage, Role.DECODE, "d", 1, 2)):
            if straggler is not second:
                straggler.open()
            straggler.again()
            refused = await straggler.refused()
            assert (refused.code, refused.fatal, refused.life) == ("outlived", False, 3)
            assert refused.message == "d has given up on a coordinator 3 times, this rank 0 times"
        assert group(stage, "d").ranks[1] is None
        assert (await later(stage, second, life=3)).welcomed


@virtual_time
async def test_a_new_engine_takes_over_from_one_that_had_come_further() -> None:
    """It has lost no coordinator yet; the former one cannot be seen to be dead, and is silent."""
    async with VirtualStage() as stage:
        former = RankPeer(stage, Role.DECODE, "d", 0, 1, life=3)
        await former.join()
        former.stop()
        new = RankPeer(stage, Role.DECODE, "d", 0, 1, process=Process(2, "elsewhere", 0))
        await new.join()
        while not new.welcomed:
            assert (await new.refused()).code == "outlived"
            await asyncio.sleep(1)
            new.again()
            await turns()
        assert now_s() < 20
        assert group(stage, "d").life == 0


@virtual_time
async def test_veterans_are_not_waited_for_when_their_engine_has_gone_on() -> None:
    """One rank reported what it remembers, and gave up a moment later with the others."""
    async with VirtualStage(config(rank={"reattach_s": 10.0})) as stage:
        memory = Memory([], [], [])
        veteran = RankPeer(stage, Role.DECODE, "d", 0, 2, epoch=99, memory=memory)
        veteran.open()
        veteran.send(veteran.hello)
        await turns()
        assert "d" not in stage.service.membership.groups
        first, second = (RankPeer(stage, Role.DECODE, "d", number, 2, life=1) for number in range(2))
        await first.join()
        assert first.welcomed
        veteran.again()
        assert (await veteran.refused()).code == "outlived"
        await second.join()
        await eventually_async(lambda: group(stage, "d").ready)
        await asyncio.sleep(20)
        assert group(stage, "d").log.head == 0


async def test_a_new_process_among_veterans_learns_which_life_it_is() -> None:
    async with Stage() as stage:
        peer = Peer(stage)
        peer.open()
        veteran = RankPeer(stage, Role.DECODE, "d", 0, 2, epoch=99, life=2).hello
        peer.send(veteran)
        await eventually_async(lambda: peer.answers)
        assert isinstance(decode_to_rank(peer.answers.pop()), WhoAreYou)
        peer.send(msgspec.structs.replace(veteran, memory=Memory([], [], [])))
        new = RankPeer(stage, Role.DECODE, "d", 1, 2)
        await new.join()
        assert (await new.refused()).life == 2


# --- an endpoint that moves ------------------------------------------------------------------


async def test_a_rank_that_moved_is_written_to_at_its_new_endpoint() -> None:
    """What was on its way to the former one fails; what waits for pages does not."""
    async with Stage(config(release={"settle_s": 0.1, "drain_s": 0.1})) as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        decode[0].offer(7, 1)
        prefill[0].send_pages(7, 1)
        decode[0].offer(8, 2)
        move = await worker.move()
        worker.forget_commands()
        decode[0].hello = msgspec.structs.replace(decode[0].hello, endpoint=b"elsewhere")
        decode[0].again()
        await eventually_async(lambda: worker.of(FencePeer))
        assert not worker.of(ConnectPeer), "not before the former link is gone"
        worker.failed(move, "disconnected")
        worker.report(Fenced(worker.of(FencePeer)[0].peer))
        await eventually_async(lambda: worker.of(ConnectPeer))
        (connect,) = worker.of(ConnectPeer)
        assert connect.endpoint == b"elsewhere"
        assert await decode[0].failure(7) == "transport"
        await decode[0].release(7)
        worker.report(Connected(connect.peer, 0.001))
        prefill[0].send_pages(8, 2)
        worker.done(await worker.move())
        assert (await decode[0].outcome(8)).succeeded
        assert stage.service.counters.ranks_lost == 0


async def test_a_rank_moves_while_it_is_being_connected() -> None:
    async with Stage() as stage:
        prefill = await stage.group(Role.PREFILL, "p", 1)
        decode = await stage.group(Role.DECODE, "d", 1)
        (worker,) = await stage.workers(auto=False)
        await worker.commanded()
        decode[0].hello = msgspec.structs.replace(decode[0].hello, endpoint=b"elsewhere")
        decode[0].again()
        await eventually_async(lambda: worker.of(FencePeer))
        (former,) = worker.of(ConnectPeer)
        worker.report(Connected(former.peer, 0.001), Fenced(former.peer))
        await eventually_async(lambda: len(worker.of(ConnectPeer)) == 2)
        connect = worker.of(ConnectPeer)[1]
        assert (former.endpoint, connect.endpoint) == (b"here", b"elsewhere")
        worker.report(Connected(connect.peer, 0.001))
        decode[0].offer(7, 1)
        prefill[0].send_pages(7, 1)
        worker.done(await worker.move())
        assert (await decode[0].outcome(7)).succeeded
