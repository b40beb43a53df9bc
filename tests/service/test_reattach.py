"""A coordinator that starts anew: who comes back to it beside whom, and that all pages come back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from coordinator.layout import Layout
from coordinator.membership import FORGET_AFTER_S
from coordinator.messages import Held, Memory, Move, Outcome, Process, Released, Role
from coordinator.pairing import pairing
from coordinator.reasons import Failure, Reason
from tests.service.peers import LAYOUT, Peer, RankPeer, WorkerPeer, hello
from tests.service.stage import Stage, VirtualStage, config, now_s, turns, virtual_time

if TYPE_CHECKING:
    from coordinator.groups import Group

NOTHING = Memory([], [], [])
ROOM_7 = Memory([], [Held(7, 0, 0)], [])
ELSEWHERE = Process(2, "elsewhere", 0)


def group(stage: Stage, name: str) -> Group:
    return stage.service.membership.groups[name]


@virtual_time
@pytest.mark.parametrize("role", Role)
async def test_a_new_engine_that_meets_a_former_room_gets_its_pages_back(role: Role) -> None:
    """The verdict of a room that was inherited is told to both sides, and so is the release."""
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    async with VirtualStage() as stage:
        old = RankPeer(stage, other, "old", 0, 1, epoch=99, memory=ROOM_7)
        await old.join()
        (new,) = await stage.group(role, "new", 1)
        if role is Role.DECODE:
            new.offer(7, 1)
        else:
            new.send_pages(7, 1)
        await stage.workers()
        for rank in (old, new):
            assert await rank.failure(7) == "coordinator_restarted"
            await rank.release(7)
            rank.drain()
        await stage.empty()


@virtual_time
async def test_an_engine_of_another_shape_is_not_mixed_with_what_is_left_of_the_former() -> None:
    """Both have the name; only one of them may have the group. The other one asks again, and gets it."""
    async with VirtualStage() as stage:
        old = stage.former(Role.DECODE, "d", 0, 2, NOTHING)
        await turns()
        old.stop()
        stages = msgspec.structs.replace(LAYOUT, stages=(1, 1))
        news = [RankPeer(stage, Role.DECODE, "d", n, 2, layout=stages, process=ELSEWHERE) for n in range(2)]
        for rank in news:
            rank.open()
            rank.send(rank.hello)
        for _ in range(5):
            await asyncio.sleep(1.0)
            for rank in news:
                if not rank.welcomed:
                    rank.again()
        await turns()
        assert all(rank.welcomed for rank in news)
        assert group(stage, "d").layout == stages
        prefill = await stage.group(Role.PREFILL, "p", 2)
        workers = await stage.workers()
        for rank in news:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        assert (await news[0].outcome(7)).succeeded
        legs = pairing(LAYOUT, 2, stages, 2)
        assert not isinstance(legs, str)
        assert sum(len(worker.of(Move)) for worker in workers) == sum(map(len, legs.by_source))


@virtual_time
@pytest.mark.parametrize(
    ("role", "world", "layout"),
    [
        (Role.DECODE, 4, LAYOUT),
        (Role.PREFILL, 2, LAYOUT),
        (Role.DECODE, 2, Layout(layers=4, page_tokens=16, kv_heads=8, head_size=16, dtype="float16")),
    ],
)
async def test_every_rank_of_another_engine_is_answered(role: Role, world: int, layout: Layout) -> None:
    async with VirtualStage() as stage:
        old = stage.former(Role.DECODE, "d", 0, 2, NOTHING)
        await turns()
        old.stop()
        news = [RankPeer(stage, role, "d", n, world, layout=layout, process=ELSEWHERE) for n in range(world)]
        for rank in news:
            rank.open()
            rank.send(rank.hello)
        await asyncio.sleep(stage.config.rank.reattach_s + 1)
        for rank in news:
            assert rank.welcomed or rank.refusals, "it hears something"
            assert not any(refused.fatal for refused in rank.refusals), "the name is free when nobody is left"
        assert not any(rank is not None and rank.hello.layout != LAYOUT for rank in group(stage, "d").ranks)


@virtual_time
async def test_a_full_coordinator_says_so_and_waits_for_no_more_groups_than_it_may_have() -> None:
    async with VirtualStage(config(limits={"max_groups": 3})) as stage:
        await stage.group(Role.PREFILL, "p", 1)
        peer = Peer(stage)
        peer.open()
        for number in range(50):
            peer.send(hello(stage, Role.DECODE, f"g{number}", 0, 2, epoch=99, memory=NOTHING))
        await turns()
        assert len(stage.service.reattach._waiting) == 2
        assert stage.service.counters.refused["full"] == 48
        # Others took the room for which these have waited.
        late = [RankPeer(stage, Role.DECODE, f"new{number}", 0, 1) for number in range(2)]
        for rank in late:
            await rank.join()
        assert all(rank.welcomed for rank in late)
        await asyncio.sleep(stage.config.rank.reattach_s + 1)
        assert stage.service.counters.refused["full"] == 50


@virtual_time
async def test_a_live_rank_is_not_pushed_out_by_one_that_comes_late() -> None:
    async with VirtualStage() as stage:
        stage.former(Role.DECODE, "d", 0, 2, NOTHING)
        await turns()
        new = RankPeer(stage, Role.DECODE, "d", 1, 2, process=ELSEWHERE)
        await new.join()
        await asyncio.sleep(2)
        member = group(stage, "d").ranks[1]
        assert member is not None
        assert member.hello.instance == new.hello.instance
        late = stage.former(Role.DECODE, "d", 1, 2, NOTHING)
        for _ in range(10):
            late.again()
            await asyncio.sleep(1)
        assert group(stage, "d").ranks[1] is member
        assert (member.alive, member.gone) == (True, False)
        assert not late.welcomed
        assert "taken" in {refused.code for refused in late.refusals}


@virtual_time
async def test_of_a_group_whose_ranks_are_all_gone_nothing_is_waited_for() -> None:
    """One of them had never come back, so that its pages could never be said to be quiet."""
    async with VirtualStage() as stage:
        (old,) = [stage.former(Role.DECODE, "d", 0, 2, ROOM_7)]
        await asyncio.sleep(30)
        stage.died(old)
        await stage.group(Role.DECODE, "d", 2, process=ELSEWHERE)
        await asyncio.sleep(30)
        assert not stage.service.rooms.unreleased
        assert not stage.service.reattach.pages._tasks
        began_s = now_s()
        await stage.service.drain(0.0, asyncio.Event())
        assert now_s() - began_s < 1


@virtual_time
async def test_what_a_rank_has_remembered_is_let_go_when_it_is_back() -> None:
    async with VirtualStage() as stage:
        ranks = [stage.former(Role.PREFILL, "p", number, 2, ROOM_7) for number in range(2)]
        await turns()
        assert all(rank.welcomed for rank in ranks)
        assert [rank.hello.memory for rank in group(stage, "p").live] == [None, None]


@virtual_time
async def test_a_rank_that_returns_while_its_worker_is_being_ended_gets_another_one() -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(2)
        worker = stage.worker(prefill[0])
        worker.immortal = True  # It takes its time.
        prefill[0].stop()
        await asyncio.sleep(stage.config.rank.lost_after_s + FORGET_AFTER_S + 1)
        prefill[0].resume()
        await turns(200)
        assert stage.member(prefill[0]).alive
        worker.immortal = False
        worker.kill("now it ends")
        await turns(200)
        await stage.workers()
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        assert (await prefill[1].outcome(7)).succeeded


# --- who is new, and who comes late ----------------------------------------------------------

TOLD = (Outcome(7, 1, Failure(Reason.STALLED, "", "stood still")), Released(7, 1))


@virtual_time
async def test_a_new_process_in_a_restored_group_does_not_hear_what_its_predecessor_did() -> None:
    async with VirtualStage() as stage:
        old = stage.former(Role.DECODE, "d", 0, 2, Memory([*TOLD], [], []), acknowledged=2)
        new = stage.former(Role.DECODE, "d", 1, 2, None)
        await turns()
        assert (old.welcomed, new.welcomed) == (1, 1)
        assert (group(stage, "d").stable, group(stage, "d").log.head) == (2, 2)
        new.cancel(8)
        for rank in (old, new):
            await rank.release(8)
        assert [(event.room, rank.base) for rank in (old, new) for event in rank.events] == [(8, 2)] * 4


@virtual_time
@pytest.mark.parametrize("remembers", ["something else", "nothing"])
async def test_a_late_rank_that_may_have_heard_something_else_is_told_to_start_anew(remembers: str) -> None:
    """It is of another epoch than its group: that went on without it before, or after."""
    async with VirtualStage() as stage:
        known = TOLD if remembers == "something else" else TOLD[1:]
        stage.former(Role.DECODE, "d", 0, 2, Memory([*known], [], []), acknowledged=2)
        await asyncio.sleep(stage.config.rank.reattach_s + 1)
        had = Memory([Outcome(8, 1)] if remembers == "something else" else [], [], [])
        late = RankPeer(stage, Role.DECODE, "d", 1, 2, epoch=98, memory=had, acknowledged=1)
        await late.join()
        refused = await late.refused()
        assert (refused.code, refused.fatal) == ("late", True)
        assert group(stage, "d").ranks[1] is None


# --- when their pages are quiet --------------------------------------------------------------


@virtual_time
async def test_a_room_that_only_a_late_rank_had_begun_is_not_released_before_its_pages_are_quiet() -> None:
    """The other one has spoken of it anew: that handoff fails, and had no move. But the former one had."""
    async with VirtualStage() as stage:
        first = stage.former(Role.DECODE, "d", 0, 2, NOTHING)
        await asyncio.sleep(stage.config.rank.reattach_s + 1)
        first.offer(7, 1)
        await turns()
        late = stage.former(Role.DECODE, "d", 1, 2, ROOM_7)
        for rank in (first, late):
            assert await rank.failure(7) == "coordinator_restarted"
        failed_s = now_s()
        await turns()
        assert not first.released(7)
        for rank in (first, late):
            await rank.release(7)
        assert now_s() - failed_s > stage.config.release.drain_s


@virtual_time
async def test_pages_are_not_quiet_before_all_engines_that_may_write_to_them_are_known_to_have_stopped() -> (
    None
):
    """Their workers are in their own processes, and outlive a coordinator."""
    async with VirtualStage() as stage:
        stage.service.reattach.pages.lodging = True
        decode = stage.former(Role.DECODE, "d", 0, 1, ROOM_7)
        prefill = [stage.former(Role.PREFILL, name, 0, 1, NOTHING) for name in ("p1", "p2")]
        await turns()
        await WorkerPeer(stage, stage.worker(prefill[0]), auto=True).join()
        assert await decode.failure(7) == "coordinator_restarted"
        await asyncio.sleep(60)
        assert not decode.released(7)
        await stage.workers()
        await decode.release(7)


@virtual_time
async def test_pages_are_not_quiet_while_an_engine_that_may_write_to_them_is_coming_back() -> None:
    async with VirtualStage() as stage:
        stage.service.reattach.pages.lodging = True
        reattach_s = stage.config.rank.reattach_s
        decode = stage.former(Role.DECODE, "d", 0, 1, ROOM_7)
        await asyncio.sleep(reattach_s - 0.1)
        prefill = [stage.former(Role.PREFILL, "p", 0, 2, NOTHING)]
        await asyncio.sleep(reattach_s - 0.2)
        assert await decode.failure(7) == "coordinator_restarted"
        assert not decode.released(7)
        prefill.append(stage.former(Role.PREFILL, "p", 1, 2, NOTHING))
        await turns()
        assert all(rank.welcomed for rank in prefill)
        await stage.workers()
        await decode.release(7)
