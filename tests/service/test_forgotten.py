"""A rank that never comes back: what is kept for it is freed after a grace, without new traffic."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from coordinator.membership import FORGET_AFTER_S
from coordinator.messages import FencePeer, Process, Role
from coordinator.reasons import Reason
from tests.service.stage import VirtualStage, turns, virtual_time
from tests.support.logs import capture

if TYPE_CHECKING:
    from coordinator.deaths import Deaths
    from coordinator.groups import Rank
    from tests.service.peers import RankPeer


@virtual_time
async def test_a_silent_peer_is_forgotten_with_its_links() -> None:
    """Case C16."""
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair()
        peer = stage.member(decode[0]).peer
        crew = stage.service.transfers.crews[stage.member(prefill[0])]
        assert peer in crew.routes
        decode[0].stop()
        with capture() as log:
            await asyncio.sleep(stage.config.rank.lost_after_s + FORGET_AFTER_S - 5)
            assert peer in crew.routes
            await asyncio.sleep(10)
        assert len(log.of("rank.forgotten")) == 1
        assert peer not in crew.routes
        assert "d" not in stage.service.membership.groups
        assert {fence.peer for fence in worker.of(FencePeer)} == {peer}


@virtual_time
@pytest.mark.parametrize("end", ["died", "forgotten"])
async def test_verdicts_are_not_kept_for_a_rank_that_has_heard_and_will_not_drain_them(end: str) -> None:
    async with VirtualStage() as stage:
        _, decode, _ = await stage.pair(2)
        decode[0].cancel(7)
        for rank in decode:
            await rank.release(7)
        decode[0].drain()
        await turns()
        ended = stage.service.membership.groups["d"].ended
        if end == "died":
            assert list(ended) == [7]
            stage.died(decode[1])
        else:
            decode[1].stop()
            await asyncio.sleep(FORGET_AFTER_S)
            assert list(ended) == [7], "it may come back, and speak of that room"
            await asyncio.sleep(stage.config.rank.lost_after_s + 1)
        assert not ended


async def watched(stage: VirtualStage) -> tuple[Deaths, RankPeer, Rank]:
    """A prefill rank in a process that the coordinator can watch; it is this one."""
    deaths = stage.service.membership._deaths
    deaths._here = ("elsewhere", 0)
    (rank,) = await stage.group(Role.PREFILL, "p", 1, process=Process(os.getpid(), *deaths._here))
    return deaths, rank, stage.member(rank)


@virtual_time
async def test_the_end_of_a_forgotten_rank_s_process_is_still_seen() -> None:
    """It may hold pages of an engine that moves them by itself, or come back."""
    async with VirtualStage() as stage:
        deaths, rank, member = await watched(stage)
        rank.stop()
        await asyncio.sleep(stage.config.rank.lost_after_s + FORGET_AFTER_S + 1)
        await turns(200)
        assert member.forgotten
        assert member not in stage.service.transfers.crews
        assert member in deaths._pidfds
        stage.service.membership.lose(member, Reason.RANK_LOST, "its place was taken", gone=True)
        await turns(200)
        assert member not in deaths._pidfds


@virtual_time
async def test_of_a_rank_whose_place_was_taken_nothing_is_watched_when_its_worker_has_ended() -> None:
    async with VirtualStage() as stage:
        deaths, _, member = await watched(stage)
        stage.service.membership.lose(member, Reason.RANK_LOST, "its place was taken", gone=True)
        assert member in deaths._pidfds, "what runs in its process is waited for"
        await turns(200)
        assert not stage.service.transfers.crews
        assert member not in deaths._pidfds


@virtual_time
async def test_who_comes_back_in_time_is_not_forgotten() -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair()
        decode[0].stop()
        await asyncio.sleep(FORGET_AFTER_S / 2)
        decode[0].resume()
        with capture() as log:
            await asyncio.sleep(FORGET_AFTER_S)
        assert not log.of("rank.forgotten")
        decode[0].offer(7, 1)
        prefill[0].send_pages(7, 1)
        assert (await decode[0].outcome(7)).succeeded
