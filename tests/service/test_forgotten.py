"""A rank that never comes back: what is kept for it is freed after a grace, without new traffic."""

from __future__ import annotations

import asyncio

from coordinator.membership import FORGET_AFTER_S
from coordinator.messages import FencePeer
from tests.service.stage import VirtualStage, virtual_time
from tests.support.logs import capture


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
