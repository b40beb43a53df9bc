"""What is held by failed handoffs is counted against a budget, and never freed for it (case C23)."""

from __future__ import annotations

import asyncio

from coordinator.messages import MoveSettled
from tests.service.peers import LAYOUT
from tests.service.stage import VirtualStage, config, virtual_time
from tests.support.logs import capture


@virtual_time
async def test_past_the_budget_there_is_trouble_until_the_pages_are_quiet() -> None:
    settings = config(release={"quarantine_bytes": 4000, "settle_s": 1000.0})
    async with VirtualStage(settings) as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        worker.connect_all()
        page_bytes = LAYOUT.pool_bytes(1, 1)
        quarantine = stage.service.quarantine
        with capture() as log:
            for room in (1, 2, 3):
                decode[0].offer(room, room)
                prefill[0].send_pages(room, room)
                await worker.move(room - 1)
                decode[0].cancel(room)
                await decode[0].failure(room)
            assert quarantine.held_bytes == 3 * page_bytes
            assert len(quarantine) == 3
            assert "3 failed handoffs hold" in quarantine.trouble
            assert not decode[0].released(1)
            for move in worker.moves():
                worker.failed(move, "revoked", settled=True, started=False)
            await decode[0].release(3)
        assert (quarantine.held_bytes, len(quarantine), quarantine.trouble) == (0, 0, "")
        assert len(log.of("quarantine.over")) == len(log.of("quarantine.under")) == 1


@virtual_time
async def test_left_out_the_budget_is_a_tenth_of_the_pools() -> None:
    async with VirtualStage() as stage:
        await stage.pair(2)
        pools = [rank.hello.pool.size_bytes for rank in stage.service.transfers.crews]
        assert len(pools) == 2
        assert stage.service._quarantine_budget() == sum(pools) // 10


@virtual_time
async def test_pages_count_until_both_sides_are_quiet_and_nothing_else_is_held_up() -> None:
    """Only what may still move counts; past the budget, others are served and nobody's pages are freed."""
    settings = config(release={"quarantine_bytes": 1, "settle_s": 1000.0, "drain_s": 2.0})
    async with VirtualStage(settings) as stage:
        (prefill,), (decode,), (worker,) = await stage.pair(auto=False)
        worker.connect_all()
        page_bytes = LAYOUT.pool_bytes(1, 1)
        quarantine = stage.service.quarantine
        decode.offer(1, 1, 2)
        prefill.send_pages(1, 1, last=False)
        worker.done(await worker.move(0))
        prefill.send_pages(1, 2)
        doomed = await worker.move(1)
        decode.cancel(1)
        await prefill.failure(1)
        assert quarantine.held_bytes == page_bytes
        assert quarantine.trouble

        # A failure is no proof of quiet, nor does time prove anything; and others are served.
        worker.failed(doomed, "transport", settled=False)
        await asyncio.sleep(900)
        decode.offer(2, 3)
        prefill.send_pages(2, 3)
        worker.done(await worker.move(2))
        assert (await decode.outcome(2)).succeeded
        assert not prefill.released(1)
        assert quarantine.held_bytes == page_bytes

        # The source is quiet; the destination only after the drain.
        worker.report(MoveSettled(doomed.move))
        await prefill.release(1)
        assert not decode.released(1)
        assert quarantine.held_bytes == page_bytes
        assert quarantine.trouble
        await decode.release(1)
        assert (quarantine.held_bytes, quarantine.trouble) == (0, "")
