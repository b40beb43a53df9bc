"""A coordinator that starts anew: which verdicts of the former one count, and for whom."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator.former_rooms import LOST
from coordinator.messages import Elsewhere, Held, Memory, Outcome, Released, Role, Send, SideData
from coordinator.reasons import Failure, Reason
from tests.service.peers import pages
from tests.service.stage import VirtualStage, turns, virtual_time

if TYPE_CHECKING:
    from coordinator.messages import Move
    from tests.service.peers import RankPeer, WorkerPeer
    from tests.service.stage import Stage

pytestmark = virtual_time

ROOM_7 = Memory([], [Held(7, 0, 0)], [])
ENOUGH = Failure(Reason.CANCELLED_BY_PREFILL, "p/0", "enough")
RESTARTED = Failure(Reason.COORDINATOR_RESTARTED, "", LOST)


@pytest.mark.parametrize("first", Role)
async def test_a_verdict_that_was_told_before_the_other_side_was_known_is_told_to_that(first: Role) -> None:
    """What decode had said was on its way to the former coordinator, or in its memory only."""
    async with VirtualStage() as stage:
        told = Memory([Outcome(7, 2, ENOUGH), Released(7, 2)], [], [])

        async def came_back(role: Role) -> RankPeer:
            if role is Role.DECODE:
                rank = stage.former(role, "d", 0, 1, ROOM_7)
            else:
                rank = stage.former(role, "p", 0, 1, told, acknowledged=2)
            await turns()
            return rank

        ranks = {
            role: await came_back(role) for role in (first, *(role for role in Role if role is not first))
        }
        decode = ranks[Role.DECODE]
        assert await decode.outcome(7, 2) == Outcome(7, 2, ENOUGH, elsewhere=decode.outcomes(7)[0].elsewhere)
        await decode.release(7, 2)
        await asyncio.sleep(60)
        assert [len(decode.events), len(ranks[Role.PREFILL].events)] == [2, 0]
        decode.drain()
        await stage.empty()


async def used_by_another(stage: Stage) -> tuple[RankPeer, RankPeer, WorkerPeer, Move]:
    """Room 7 was offered anew to a new coordinator, and a new engine sends."""
    said = Memory([], [], [], [], [Held(7, 0, 0)], lineage=5)
    decode = stage.former(Role.DECODE, "d", 0, 1, said)
    await turns()
    decode.offer(7, 1)
    (third,) = await stage.group(Role.PREFILL, "p2", 1)
    (worker,) = await stage.workers(auto=False)
    await worker.commanded()
    worker.connect_all()
    third.send_pages(7, 1)
    return decode, third, worker, await worker.move()


async def test_a_room_that_another_engine_uses_already_is_a_later_attempt_than_any_that_comes_to_light() -> (
    None
):
    async with VirtualStage() as stage:
        decode, third, worker, move = await used_by_another(stage)
        stage.former(Role.PREFILL, "p", 0, 1, Memory([Outcome(7, 3, ENOUGH)], [], []), acknowledged=1)
        await turns()
        worker.done(move)
        for rank in (decode, third):
            assert (await rank.outcome(7, 4)).succeeded
            assert len(rank.outcomes(7)) == 1


async def test_a_verdict_is_not_adopted_for_pages_that_a_third_party_writes_to_already() -> None:
    """Its bytes may be on their way."""
    async with VirtualStage() as stage:
        decode, third, worker, move = await used_by_another(stage)
        arrived = Memory([Outcome(7, 1, None, b"", Elsewhere(5, 1))], [], [], [SideData(7, 1, b"aux")])
        stage.former(Role.PREFILL, "p", 0, 1, arrived, acknowledged=1)
        for rank in (decode, third):
            outcome = await rank.outcome(7, 2)
            assert outcome.failure == RESTARTED
            assert len(rank.outcomes(7)) == 1
        worker.failed(move)
        for rank in (decode, third):
            await rank.release(7, 2)
            rank.drain()


async def test_a_later_attempt_keeps_its_number_when_an_earlier_verdict_comes_to_light() -> None:
    async with VirtualStage() as stage:
        decode = stage.former(Role.DECODE, "d", 0, 1, Memory([], [Held(7, 0, 4)], []))
        await turns()
        stage.former(Role.PREFILL, "p", 0, 1, Memory([Outcome(7, 2, ENOUGH)], [], []), acknowledged=1)
        assert (await decode.outcome(7, 5)).failure == RESTARTED
        assert len(decode.outcomes(7)) == 1


async def test_what_a_former_verdict_was_about_is_late_also_after_a_restart() -> None:
    """Said before the engine had drained that verdict, and heard only by the next coordinator."""
    async with VirtualStage() as stage:
        memory = Memory([Outcome(7, 3, ENOUGH), Released(7, 3)], [], [])
        rank = stage.former(Role.PREFILL, "p", 0, 1, memory, acknowledged=2)
        for _ in range(100):
            if rank.welcomed:
                break
            await turns(1)
        assert not rank.listening, "it has not told yet what it has drained"
        rank.applied = 0
        await turns()
        rank.submit(Send(7, 0, pages(1), last=True))
        await turns()
        assert stage.service.counters.late == {"send": 1}
        assert not stage.service.rooms.active
        rank.drain()
        rank.send_pages(7, 1)
        await turns()
        assert stage.service.rooms.active[7].machine.attempt == 4
